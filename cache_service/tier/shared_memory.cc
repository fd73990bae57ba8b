#include "cache_service/tier/shared_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// shm_open wants one slash, at the front.
std::string ShmPath(const std::string& name) { return absl::StrCat("/", name); }

absl::Status CheckName(const std::string& name) {
  if (!name.empty() && name.size() <= 200 && name.find('/') == std::string::npos) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("slab_name is \"", name, "\", want 1 to 200 characters without \"/\""));
}

absl::Status SystemError(const char* call, const std::string& name) {
  const std::string text =
      absl::StrCat(call, " of shared memory \"", name, "\": ", std::strerror(errno));
  switch (errno) {
    case ENOENT:
      return absl::NotFoundError(text);
    case EEXIST:
      return absl::AlreadyExistsError(text);
    case ENOSPC:
    case ENOMEM:
      return absl::ResourceExhaustedError(text);
    default:
      return absl::UnavailableError(text);
  }
}

absl::StatusOr<std::byte*> Map(const std::string& name, int fd, int64_t bytes) {
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) return SystemError("mmap", name);
  return static_cast<std::byte*>(data);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(const std::string& name,
                                                                   int64_t bytes) {
  if (name.empty()) {
    HW_ASSIGN_OR_RETURN(std::byte* const data, Map(name, -1, bytes));
    return std::unique_ptr<SharedMemory>(new SharedMemory(name, -1, data, bytes, true));
  }
  HW_RETURN_IF_ERROR(CheckName(name));
  const int fd = shm_open(ShmPath(name).c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return SystemError("shm_open", name);
  flock(fd, LOCK_EX | LOCK_NB);  // says for as long as this process lives: not stale
  absl::StatusOr<std::byte*> data =
      ftruncate(fd, bytes) == 0 ? Map(name, fd, bytes) : SystemError("ftruncate", name);
  if (!data.ok()) {
    close(fd);
    shm_unlink(ShmPath(name).c_str());
    return data.status();
  }
  return std::unique_ptr<SharedMemory>(new SharedMemory(name, fd, *data, bytes, true));
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Open(const std::string& name,
                                                                 int64_t bytes) {
  HW_RETURN_IF_ERROR(CheckName(name));
  const int fd = shm_open(ShmPath(name).c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return SystemError("shm_open", name);
  struct stat info {};
  absl::StatusOr<std::byte*> data = absl::FailedPreconditionError("");
  if (fstat(fd, &info) != 0) {
    data = SystemError("fstat", name);
  } else if (info.st_size != bytes) {
    data = absl::FailedPreconditionError(
        absl::StrCat("slab \"", name, "\" has ", info.st_size, " bytes, want ", bytes));
  } else {
    data = Map(name, fd, bytes);
  }
  if (!data.ok()) {
    close(fd);
    return data.status();
  }
  return std::unique_ptr<SharedMemory>(new SharedMemory(name, fd, *data, bytes, false));
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Adopt(const std::string& name,
                                                                  int64_t bytes) {
  HW_ASSIGN_OR_RETURN(std::unique_ptr<SharedMemory> memory, Open(name, bytes));
  // Who only looks whether it is in use (FindWaitingSlabs()) has it for a moment.
  bool locked = false;
  for (int tries = 0; tries < 20 && !locked; ++tries) {
    if (tries > 0) usleep(5'000);
    locked = flock(memory->fd_, LOCK_EX | LOCK_NB) == 0;
  }
  if (!locked) {
    return absl::UnavailableError(
        absl::StrCat("slab \"", name, "\" belongs to another process that runs"));
  }
  memory->owner_ = true;
  return memory;
}

SharedMemory::~SharedMemory() {
  munmap(data_, bytes_);
  if (fd_ < 0) return;
  close(fd_);
  if (owner_) shm_unlink(ShmPath(name_).c_str());
}

absl::Status SharedMemory::Commit(int64_t bytes) {
  if (fd_ < 0) return absl::OkStatus();
  while (fallocate(fd_, 0, 0, bytes) != 0) {
    if (errno == EINTR) continue;
    return absl::Status(
        absl::StatusCode::kResourceExhausted,
        absl::StrCat("the system has no room for ", bytes, " of the slab's ", bytes_,
                     " bytes: ", std::strerror(errno), " (see the size of /dev/shm)"));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
