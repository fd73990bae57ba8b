#include "worker/model/gguf_file.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cache_service/base/status.h"
#include "worker/model/message.h"
#include "worker/model/model_fingerprint.h"

namespace heavywater {
namespace {

absl::Status WrongType(std::string_view field, GgufType got, std::string_view want) {
  return absl::InvalidArgumentError(
      Message("field '", field, "' is ", GgufTypeName(got), ", want ", want));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path) {
  HW_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(path));
  std::unique_ptr<GgufFile> file(new GgufFile(std::move(mapped)));
  auto contents = ParseGguf(file->file_.bytes());
  if (!contents.ok()) {
    return absl::Status(contents.status().code(), Message(path, ": ", contents.status().message()));
  }
  file->contents_ = *std::move(contents);
  return file;
}

absl::StatusOr<ModelConfig> GgufFile::ReadConfig() const { return ReadModelConfig(*this); }
absl::StatusOr<TokenizerSpec> GgufFile::ReadTokenizer() const { return ReadTokenizerSpec(*this); }
std::string GgufFile::Fingerprint() const { return ModelFingerprint(*this); }

absl::StatusOr<const GgufValue*> GgufFile::GetValue(std::string_view field) const {
  const auto found = contents_.metadata.find(field);
  if (found == contents_.metadata.end()) {
    return absl::NotFoundError(Message("field '", field, "' is missing"));
  }
  return &found->second;
}

absl::StatusOr<std::string_view> GgufFile::GetString(std::string_view field) const {
  HW_ASSIGN_OR_RETURN(const GgufValue* value, GetValue(field));
  const auto* text = std::get_if<std::string_view>(&value->value);
  if (text == nullptr) return WrongType(field, value->type, "string");
  return *text;
}

absl::StatusOr<int64_t> GgufFile::GetInteger(std::string_view field) const {
  HW_ASSIGN_OR_RETURN(const GgufValue* value, GetValue(field));
  if (const auto* number = std::get_if<int64_t>(&value->value)) return *number;
  const auto* number = std::get_if<uint64_t>(&value->value);
  if (number == nullptr) return WrongType(field, value->type, "an integer");
  if (*number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return absl::InvalidArgumentError(
        Message("field '", field, "' is ", *number, ", want less than 2^63"));
  }
  return static_cast<int64_t>(*number);
}

absl::StatusOr<double> GgufFile::GetFloat(std::string_view field) const {
  HW_ASSIGN_OR_RETURN(const GgufValue* value, GetValue(field));
  const auto* number = std::get_if<double>(&value->value);
  if (number == nullptr) return WrongType(field, value->type, "a float");
  return *number;
}

absl::StatusOr<bool> GgufFile::GetBool(std::string_view field) const {
  HW_ASSIGN_OR_RETURN(const GgufValue* value, GetValue(field));
  const auto* flag = std::get_if<bool>(&value->value);
  if (flag == nullptr) return WrongType(field, value->type, "bool");
  return *flag;
}

absl::StatusOr<std::span<const std::string_view>> GgufFile::GetStrings(
    std::string_view field) const {
  HW_ASSIGN_OR_RETURN(const GgufValue* value, GetValue(field));
  const auto* array = std::get_if<GgufArray>(&value->value);
  if (array == nullptr) return WrongType(field, value->type, "an array of strings");
  if (array->type != GgufType::kString) {
    return WrongType(field, array->type, "strings in its array");
  }
  return std::span<const std::string_view>(array->strings);
}

template <typename T>
absl::StatusOr<std::vector<T>> GgufFile::GetNumbers(std::string_view field, GgufType type) const {
  HW_ASSIGN_OR_RETURN(const GgufValue* value, GetValue(field));
  const std::string want = GgufTypeName(type);
  const auto* array = std::get_if<GgufArray>(&value->value);
  if (array == nullptr) return WrongType(field, value->type, "an array of " + want);
  if (array->type != type) return WrongType(field, array->type, want + " in its array");
  std::vector<T> numbers(static_cast<size_t>(array->count));
  if (!numbers.empty()) std::memcpy(numbers.data(), array->numbers.data(), array->numbers.size());
  return numbers;
}

absl::StatusOr<std::vector<int32_t>> GgufFile::GetInt32s(std::string_view field) const {
  return GetNumbers<int32_t>(field, GgufType::kInt32);
}

absl::StatusOr<std::vector<float>> GgufFile::GetFloats(std::string_view field) const {
  return GetNumbers<float>(field, GgufType::kFloat32);
}

const GgufTensor* GgufFile::FindTensor(std::string_view name) const {
  const auto found = contents_.tensors.find(name);
  return found == contents_.tensors.end() ? nullptr : &found->second;
}

std::vector<std::string_view> GgufFile::TensorNames() const {
  std::vector<std::string_view> names;
  for (const auto& [name, tensor] : contents_.tensors) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace heavywater
