#include "worker/model/safetensors_folder.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "cache_service/base/status.h"
#include "worker/model/json_fields.h"
#include "worker/model/message.h"
#include "worker/model/model_fingerprint.h"
#include "worker/model/tokenizer_folder.h"
#include "worker/model/transformers_config.h"

namespace heavywater {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxFiles = 4096;

// GGUF's name of a layer's tensor and Transformers', without "blk.N." and "model.layers.N.".
constexpr std::array<std::pair<std::string_view, std::string_view>, 14> kLayerNames = {{
    {"attn_norm.weight", "input_layernorm.weight"},
    {"attn_q.weight", "self_attn.q_proj.weight"},
    {"attn_k.weight", "self_attn.k_proj.weight"},
    {"attn_v.weight", "self_attn.v_proj.weight"},
    {"attn_q.bias", "self_attn.q_proj.bias"},
    {"attn_k.bias", "self_attn.k_proj.bias"},
    {"attn_v.bias", "self_attn.v_proj.bias"},
    {"attn_q_norm.weight", "self_attn.q_norm.weight"},
    {"attn_k_norm.weight", "self_attn.k_norm.weight"},
    {"attn_output.weight", "self_attn.o_proj.weight"},
    {"ffn_norm.weight", "post_attention_layernorm.weight"},
    {"ffn_gate.weight", "mlp.gate_proj.weight"},
    {"ffn_up.weight", "mlp.up_proj.weight"},
    {"ffn_down.weight", "mlp.down_proj.weight"},
}};
constexpr std::string_view kOutput = "lm_head.weight";
constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kNames = {{
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", kOutput},
}};

// The name that goes with `name` in a table, or nothing.
template <size_t kSize>
std::string_view LookUp(
    const std::array<std::pair<std::string_view, std::string_view>, kSize>& table,
    std::string_view name) {
  for (const auto& [gguf, transformers] : table) {
    if (gguf == name) return transformers;
  }
  return {};
}

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), Message(path, ": ", status.message()));
}

// The folder's own name, also of "models/name/".
std::string NameOf(const std::string& folder) {
  const std::filesystem::path path = std::filesystem::path(folder).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

// The files that an index names, in order, after it was checked.
absl::StatusOr<std::set<std::string>> FilesOf(const Json& index) {
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object() || map->empty()) {
    return absl::InvalidArgumentError(
        "field 'weight_map' is missing, want tensors and their files");
  }
  std::set<std::string> files;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || name.find('/') != std::string::npos || name == "." || name == "..") {
      return absl::InvalidArgumentError(Message("the file of tensor ", Quoted(tensor), " is ",
                                                Quoted(name), ", want a file's name"));
    }
    files.insert(name);
  }
  if (files.size() <= kMaxFiles) return files;
  return absl::ResourceExhaustedError(
      Message("number of files is ", files.size(), ", limit ", kMaxFiles));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsFolder>> SafetensorsFolder::Open(
    const std::string& folder) {
  std::unique_ptr<SafetensorsFolder> model(new SafetensorsFolder(folder));
  HW_ASSIGN_OR_RETURN(model->config_, MappedFile::Open(folder + "/config.json"));
  HW_RETURN_IF_ERROR(model->OpenWeights());
  for (const Part& part : model->parts_) {
    for (const GgufTensor& tensor : part.contents.tensors) {
      if (model->tensors_.emplace(tensor.name, &tensor).second) continue;
      return absl::InvalidArgumentError(
          Message(folder, ": tensor ", Quoted(tensor.name), " is in two files"));
    }
  }
  return model;
}

absl::Status SafetensorsFolder::OpenWeights() {
  const std::string index = folder_ + "/model.safetensors.index.json";
  std::error_code error;
  if (std::filesystem::exists(index, error)) return OpenIndexed(index);
  return OpenPart("model.safetensors");
}

absl::Status SafetensorsFolder::OpenPart(const std::string& name) {
  const std::string path = Message(folder_, "/", name);
  Part part;
  HW_ASSIGN_OR_RETURN(part.file, MappedFile::Open(path));
  auto contents = ParseSafetensors(part.file.bytes());
  if (!contents.ok()) return InFile(path, contents.status());
  part.contents = *std::move(contents);
  parts_.push_back(std::move(part));
  return absl::OkStatus();
}

absl::Status SafetensorsFolder::OpenIndexed(const std::string& path) {
  HW_ASSIGN_OR_RETURN(const Json index, ReadJsonObject(path));
  const auto files = FilesOf(index);
  if (!files.ok()) return InFile(path, files.status());
  for (const std::string& file : *files) HW_RETURN_IF_ERROR(OpenPart(file));
  std::set<std::string_view> there;
  for (const Part& part : parts_) {
    for (const GgufTensor& tensor : part.contents.tensors) there.insert(tensor.name);
  }
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (there.contains(tensor)) continue;
    return absl::InvalidArgumentError(
        Message(path, ": tensor ", Quoted(tensor), " is in none of the files"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> SafetensorsFolder::ReadConfig() const {
  const std::span<const std::byte> text = config_.bytes();
  auto json =
      ParseJsonObject({reinterpret_cast<const char*>(text.data()), text.size()}, kMaxConfigBytes);
  const std::string path = folder_ + "/config.json";
  if (!json.ok()) return InFile(path, json.status());
  auto config = ParseTransformersConfig(*json, tensors_.contains(kOutput));
  if (!config.ok()) return InFile(path, config.status());
  config->name = NameOf(folder_);
  return config;
}

absl::StatusOr<TokenizerSpec> SafetensorsFolder::ReadTokenizer() const {
  return ReadTokenizerFolder(folder_);
}

std::string SafetensorsFolder::Fingerprint() const {
  FingerprintHash hash;
  hash.Add(config_.bytes());
  for (const Part& part : parts_) {
    const std::span<const std::byte> bytes = part.file.bytes();
    hash.Add(bytes.first(static_cast<size_t>(part.contents.header_bytes)));
    hash.Add(static_cast<int64_t>(bytes.size()));
    for (const GgufTensor& tensor : part.contents.tensors) hash.AddSamples(tensor.data);
  }
  return hash.Name("safetensors-");
}

std::string SafetensorsFolder::StoredName(std::string_view name) const {
  constexpr std::string_view kBlock = "blk.";
  const size_t dot = name.find('.', kBlock.size());
  if (name.substr(0, kBlock.size()) == kBlock && dot != std::string_view::npos) {
    const std::string_view stored = LookUp(kLayerNames, name.substr(dot + 1));
    const std::string_view layer = name.substr(kBlock.size(), dot - kBlock.size());
    if (!stored.empty()) return Message("model.layers.", layer, ".", stored);
  }
  const std::string_view stored = LookUp(kNames, name);
  return std::string(stored.empty() ? name : stored);
}

const GgufTensor* SafetensorsFolder::FindTensor(std::string_view name) const {
  const auto found = tensors_.find(StoredName(name));
  return found == tensors_.end() ? nullptr : found->second;
}

std::vector<std::string_view> SafetensorsFolder::TensorNames() const {
  const auto config = ReadConfig();
  const bool tied = config.ok() && config->tied_embeddings;
  std::vector<std::string_view> names;
  for (const auto& [name, tensor] : tensors_) {
    if (name.ends_with(".rotary_emb.inv_freq") || (tied && name == kOutput)) continue;
    names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace heavywater
