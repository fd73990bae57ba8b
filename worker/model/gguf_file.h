// A GGUF file, mapped and checked: typed access to metadata and tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/gguf_parser.h"
#include "worker/model/gguf_types.h"

namespace heavywater {

// Immutable and thread safe. Everything it returns is a view that lives as long
// as it does. The file must not be shortened meanwhile (as with any mapping,
// the process would get SIGBUS).
class GgufFile {
 public:
  // NOT_FOUND or PERMISSION_DENIED from the system; else as ParseGguf(), with
  // the path before the message.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Open(const std::string& path);

  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  bool Has(std::string_view field) const { return contents_.metadata.contains(field); }

  // NOT_FOUND when the field is missing, INVALID_ARGUMENT when it has another
  // type; both name it. Any integer type will do where the value fits.
  absl::StatusOr<std::string_view> GetString(std::string_view field) const;
  absl::StatusOr<int64_t> GetInteger(std::string_view field) const;
  absl::StatusOr<double> GetFloat(std::string_view field) const;
  absl::StatusOr<bool> GetBool(std::string_view field) const;
  absl::StatusOr<std::span<const std::string_view>> GetStrings(std::string_view field) const;
  absl::StatusOr<std::vector<int32_t>> GetInt32s(std::string_view field) const;

  // NOT_FOUND naming the tensor; nullptr from Find.
  absl::StatusOr<GgufTensor> GetTensor(std::string_view name) const;
  const GgufTensor* FindTensor(std::string_view name) const;
  std::vector<std::string_view> TensorNames() const;  // sorted

  int64_t file_bytes() const { return static_cast<int64_t>(bytes_.size()); }
  // Metadata and tensor table, as stored.
  std::span<const std::byte> header() const {
    return bytes_.first(static_cast<size_t>(contents_.header_bytes));
  }

 private:
  GgufFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  absl::StatusOr<const GgufValue*> GetValue(std::string_view field) const;

  std::span<const std::byte> bytes_;  // the mapping
  GgufContents contents_;
};

}  // namespace heavywater
