#include "worker/model/gguf_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/cleanup/cleanup.h"
#include "cache_service/base/status.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

absl::StatusOr<std::span<const std::byte>> MapFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, Message("cannot open ", path));
  const absl::Cleanup close_file = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, Message("cannot read ", path));
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(path + " is not a regular file");
  if (info.st_size == 0) return absl::DataLossError(path + " is empty");
  const auto bytes = static_cast<size_t>(info.st_size);
  void* address = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  if (address == MAP_FAILED) return absl::ErrnoToStatus(errno, Message("cannot map ", path));
  return std::span(static_cast<const std::byte*>(address), bytes);
}

absl::Status WrongType(std::string_view field, GgufType got, std::string_view want) {
  return absl::InvalidArgumentError(
      Message("field '", field, "' is ", GgufTypeName(got), ", want ", want));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path) {
  HW_ASSIGN_OR_RETURN(const auto bytes, MapFile(path));
  std::unique_ptr<GgufFile> file(new GgufFile(bytes));
  auto contents = ParseGguf(bytes);
  if (!contents.ok()) {
    return absl::Status(contents.status().code(), Message(path, ": ", contents.status().message()));
  }
  file->contents_ = *std::move(contents);
  return file;
}

GgufFile::~GgufFile() { munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()); }

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

absl::StatusOr<std::vector<int32_t>> GgufFile::GetInt32s(std::string_view field) const {
  HW_ASSIGN_OR_RETURN(const GgufValue* value, GetValue(field));
  const auto* array = std::get_if<GgufArray>(&value->value);
  if (array == nullptr) return WrongType(field, value->type, "an array of int32");
  if (array->type != GgufType::kInt32) return WrongType(field, array->type, "int32 in its array");
  std::vector<int32_t> numbers(static_cast<size_t>(array->count));
  if (!numbers.empty()) std::memcpy(numbers.data(), array->numbers.data(), array->numbers.size());
  return numbers;
}

const GgufTensor* GgufFile::FindTensor(std::string_view name) const {
  const auto found = contents_.tensors.find(name);
  return found == contents_.tensors.end() ? nullptr : &found->second;
}

absl::StatusOr<GgufTensor> GgufFile::GetTensor(std::string_view name) const {
  if (const GgufTensor* tensor = FindTensor(name)) return *tensor;
  return absl::NotFoundError(Message("tensor '", name, "' is missing"));
}

std::vector<std::string_view> GgufFile::TensorNames() const {
  std::vector<std::string_view> names;
  for (const auto& [name, tensor] : contents_.tensors) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace heavywater
