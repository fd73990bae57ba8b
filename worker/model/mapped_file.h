// A file mapped into memory, read only.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace heavywater {

// Moves; the bytes stay where they are. The file must not be shortened meanwhile (as
// with any mapping, the process would get SIGBUS).
class MappedFile {
 public:
  // NOT_FOUND or PERMISSION_DENIED from the system, INVALID_ARGUMENT for what is no
  // regular file, DATA_LOSS for an empty one; each names the path.
  static absl::StatusOr<MappedFile> Open(const std::string& path);

  MappedFile() = default;
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace heavywater
