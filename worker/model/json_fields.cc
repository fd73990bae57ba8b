#include "worker/model/json_fields.h"

#include <cmath>

#include "cache_service/base/status.h"
#include "worker/model/mapped_file.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxValues = 4'000'000;  // a tokenizer's 500,000 merges as pairs: 1.5 million
constexpr size_t kMaxShown = 80;

std::string Shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return text;
}

// Whether brackets are nested no deeper than any real file's (what walks over values later
// does so recursively), and values are no more: each takes many times its text.
absl::Status CheckShape(std::string_view text) {
  constexpr int kMaxDepth = 100;
  int depth = 0;
  int64_t values = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') {
      ++i;  // whatever is escaped
    } else if (c == '"') {
      in_string = !in_string;
    } else if (!in_string && (c == '[' || c == '{')) {
      ++values;
      if (++depth > kMaxDepth) {
        return absl::InvalidArgumentError("it nests deeper than 100 levels");
      }
    } else if (!in_string && (c == ']' || c == '}')) {
      --depth;
    } else if (!in_string && c == ',') {
      ++values;
    }
  }
  if (values <= kMaxValues) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      Message("it has more than ", values, " values, limit ", kMaxValues));
}

}  // namespace

const Json* JsonFields::Find(std::string_view field) const {
  if (!object_.is_object()) return nullptr;
  const auto found = object_.find(std::string(field));
  if (found == object_.end() || found->is_null()) return nullptr;
  return &*found;
}

absl::Status JsonFields::Error(std::string_view field, std::string_view want) const {
  const Json* value = Find(field);
  if (value == nullptr) {
    return absl::NotFoundError(Message("field '", Name(field), "' is missing, want ", want));
  }
  return absl::InvalidArgumentError(
      Message("field '", Name(field), "' is ", Shown(*value), ", want ", want));
}

absl::StatusOr<int> JsonFields::Size(std::string_view field, int64_t limit) const {
  const Json* value = Find(field);
  const auto error = [&] { return Error(field, Message("1 to ", limit)); };
  if (value == nullptr || !value->is_number_integer()) return error();
  const auto number = value->get<int64_t>();  // 2^63 and above become negative
  if (number < 1 || number > limit) return error();
  return static_cast<int>(number);
}

absl::StatusOr<int> JsonFields::SizeOr(std::string_view field, int64_t limit, int otherwise) const {
  if (!Has(field)) return otherwise;
  return Size(field, limit);
}

absl::StatusOr<double> JsonFields::Positive(std::string_view field) const {
  const Json* value = Find(field);
  if (value == nullptr || !value->is_number()) return Error(field, "a positive number");
  const auto number = value->get<double>();
  if (!std::isfinite(number) || number <= 0) return Error(field, "a positive number");
  return number;
}

absl::StatusOr<double> JsonFields::PositiveOr(std::string_view field, double otherwise) const {
  if (!Has(field)) return otherwise;
  return Positive(field);
}

absl::StatusOr<bool> JsonFields::BoolOr(std::string_view field, bool otherwise) const {
  const Json* value = Find(field);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) return Error(field, "true or false");
  return value->get<bool>();
}

absl::StatusOr<std::string> JsonFields::Text(std::string_view field) const {
  const Json* value = Find(field);
  if (value == nullptr || !value->is_string()) return Error(field, "a text");
  return value->get<std::string>();
}

absl::StatusOr<std::string> JsonFields::TextOr(std::string_view field,
                                               std::string_view otherwise) const {
  if (!Has(field)) return std::string(otherwise);
  return Text(field);
}

absl::StatusOr<Json> ParseJsonObject(std::string_view text, size_t max_bytes) {
  if (text.size() > max_bytes) {
    return absl::ResourceExhaustedError(
        Message("it has ", text.size(), " bytes, limit ", max_bytes));
  }
  HW_RETURN_IF_ERROR(CheckShape(text));
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("it is not one JSON object");
  return json;
}

absl::StatusOr<Json> ReadJsonObject(const std::string& path, size_t max_bytes) {
  HW_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  const auto bytes = file.bytes();
  auto json =
      ParseJsonObject({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, max_bytes);
  if (json.ok()) return json;
  return absl::Status(json.status().code(), Message(path, ": ", json.status().message()));
}

}  // namespace heavywater
