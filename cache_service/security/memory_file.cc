#include "cache_service/security/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/mutex.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

absl::Status Failed(const char* call) {
  return absl::InternalError(absl::StrCat(call, ": ", std::strerror(errno)));
}

absl::StatusOr<int> NewFile(const std::string& contents) {
  const int fd = memfd_create("heavywater", MFD_CLOEXEC);
  if (fd < 0) return Failed("memfd_create");
  size_t done = 0;
  while (done < contents.size()) {
    const ssize_t wrote = write(fd, contents.data() + done, contents.size() - done);
    if (wrote < 0) {
      const absl::Status failed = Failed("write to a file in memory");
      close(fd);
      return failed;
    }
    done += static_cast<size_t>(wrote);
  }
  return fd;
}

// Descriptors whose objects have gone. gRPC's watcher of a certificate ends some time after
// the last channel that uses it: it must not find another kind of file under its path.
class SpareFiles {
 public:
  int Take() {
    MutexLock lock(&mutex_);
    if (fds_.empty()) return -1;
    const int fd = fds_.back();
    fds_.pop_back();
    return fd;
  }
  void Give(int fd) {
    MutexLock lock(&mutex_);
    fds_.push_back(fd);
  }

 private:
  Mutex mutex_;
  std::vector<int> fds_ ABSL_GUARDED_BY(mutex_);
};

SpareFiles& Spare() {
  static auto* const spare = new SpareFiles;
  return *spare;
}

}  // namespace

absl::StatusOr<MemoryFile> MemoryFile::Create(const std::string& contents) {
  const int spare = Spare().Take();
  if (spare < 0) {
    HW_ASSIGN_OR_RETURN(const int fd, NewFile(contents));
    return MemoryFile(fd);
  }
  MemoryFile file(spare);
  HW_RETURN_IF_ERROR(file.Replace(contents));
  return file;
}

MemoryFile::~MemoryFile() {
  if (fd_ >= 0) Spare().Give(fd_);
}

absl::Status MemoryFile::Replace(const std::string& contents) {
  HW_ASSIGN_OR_RETURN(const int fd, NewFile(contents));
  // In one step: whoever opens path() gets this file or that.
  const int replaced = dup3(fd, fd_, O_CLOEXEC);
  const absl::Status failed = replaced < 0 ? Failed("dup3") : absl::OkStatus();
  close(fd);
  return failed;
}

std::string MemoryFile::path() const { return absl::StrCat("/proc/self/fd/", fd_); }

}  // namespace heavywater
