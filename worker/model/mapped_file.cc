#include "worker/model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "worker/model/message.h"

namespace heavywater {

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: a pipe of that name is refused below, not waited for.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, Message("cannot open ", path));
  const absl::Cleanup close_file = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, Message("cannot read ", path));
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(path + " is not a regular file");
  if (info.st_size == 0) return absl::DataLossError(path + " is empty");
  const auto bytes = static_cast<size_t>(info.st_size);
  void* address = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  if (address == MAP_FAILED) return absl::ErrnoToStatus(errno, Message("cannot map ", path));
  MappedFile file;
  file.bytes_ = std::span(static_cast<const std::byte*>(address), bytes);
  return file;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace heavywater
