#include "worker/model/tokenizer_folder.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cache_service/base/status.h"
#include "worker/model/json_fields.h"
#include "worker/model/mapped_file.h"
#include "worker/model/message.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

using Json = nlohmann::json;

bool Exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

// An empty object where there is no such file.
absl::StatusOr<Json> ReadIfThere(const std::string& path) {
  if (!Exists(path)) return Json::object();
  return ReadJsonObject(path, kMaxConfigBytes);
}

// A token's text: a string, or an object that has it as `content`; empty when missing.
std::string TokenText(const Json& config, const char* field) {
  const Json* value = JsonFields(config).Find(field);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  const Json* content = JsonFields(*value).Find("content");
  return content != nullptr && content->is_string() ? content->get<std::string>() : "";
}

void AddEnd(int32_t id, TokenizerSpec& spec) {
  if (id < 0 || static_cast<size_t>(id) >= spec.tokens.size()) return;
  if (spec.end_of_turn == kNoToken) spec.end_of_turn = id;
  if (id == spec.end_of_turn || std::ranges::count(spec.other_ends, id) > 0) return;
  spec.other_ends.push_back(id);
}

// eos_token_id of generation_config.json and config.json: an id or several.
void AddEnds(const Json& config, TokenizerSpec& spec) {
  const Json ends = config.value("eos_token_id", Json());
  for (const Json& end : ends.is_array() ? ends : Json::array({ends})) {
    if (end.is_number_unsigned() && end <= spec.tokens.size()) AddEnd(end.get<int32_t>(), spec);
  }
}

int32_t Find(const std::string& token, const TokenizerSpec& spec) {
  if (token.empty()) return kNoToken;
  const auto found = std::ranges::find(spec.tokens, token);
  if (found == spec.tokens.end()) return kNoToken;
  return static_cast<int32_t>(found - spec.tokens.begin());
}

// tokenizer_config.json's: one template, or several of which "default" is taken.
std::string ChatTemplate(const Json& config) {
  const Json value = config.value("chat_template", Json());
  if (value.is_string()) return value.get<std::string>();
  for (const Json& entry : value.is_array() ? value : Json::array()) {
    if (TokenText(entry, "name") == "default") return TokenText(entry, "template");
  }
  return "";
}

absl::Status ReadBesides(const std::string& folder, TokenizerSpec& spec) {
  HW_ASSIGN_OR_RETURN(const Json config, ReadIfThere(folder + "/tokenizer_config.json"));
  AddEnd(Find(TokenText(config, "eos_token"), spec), spec);
  for (const char* name : {"/generation_config.json", "/config.json"}) {
    HW_ASSIGN_OR_RETURN(const Json other, ReadIfThere(folder + name));
    AddEnds(other, spec);
  }
  const int32_t begin = Find(TokenText(config, "bos_token"), spec);
  if (spec.begin_of_text == kNoToken) spec.begin_of_text = begin;
  spec.chat_template = ChatTemplate(config);
  HW_RETURN_IF_ERROR(
      CheckText(folder + "/tokenizer_config.json: field 'chat_template'", spec.chat_template));
  const std::string path = folder + "/chat_template.jinja";
  if (!Exists(path)) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  const auto bytes = file.bytes();
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  HW_RETURN_IF_ERROR(CheckText(path, text));
  spec.chat_template = text;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerSpec> ReadTokenizerFolder(const std::string& folder) {
  const std::string path = folder + "/tokenizer.json";
  HW_ASSIGN_OR_RETURN(const Json json, ReadJsonObject(path));
  auto spec = ParseTokenizerJson(json);
  if (!spec.ok()) {
    return absl::Status(spec.status().code(), Message(path, ": ", spec.status().message()));
  }
  HW_RETURN_IF_ERROR(ReadBesides(folder, *spec));
  return spec;
}

}  // namespace heavywater
