// A file that exists in memory only, for libraries that want a path.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heavywater {

// Gone with the process, however that ends: good for copies of private keys. Readers of
// path() find either the whole old contents or the whole new. The path stays that of such a
// file when the object has gone, for readers that end later: its descriptor is kept for the
// next one.
class MemoryFile {
 public:
  static absl::StatusOr<MemoryFile> Create(const std::string& contents);
  ~MemoryFile();
  MemoryFile(MemoryFile&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  MemoryFile& operator=(MemoryFile&&) = delete;

  absl::Status Replace(const std::string& contents);
  std::string path() const;  // only good in this process

 private:
  explicit MemoryFile(int fd) : fd_(fd) {}

  int fd_;
};

}  // namespace heavywater
