// A POSIX shared memory object mapped into this process. Used by the slab's
// owner and by the ranks that map it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heavywater {

// Not thread safe, except for the bytes themselves.
class SharedMemory {
 public:
  // A new object of `bytes`, sparse: memory is taken by Commit(). Without a name
  // it is anonymous memory of this process. ALREADY_EXISTS when the name is taken.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(const std::string& name,
                                                              int64_t bytes);
  // Maps an existing object. NOT_FOUND when there is none of this name on this
  // node; FAILED_PRECONDITION when its size is not `bytes`.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Open(const std::string& name, int64_t bytes);

  // Likewise, as the owner of an object whose owner has gone. UNAVAILABLE: it has one.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Adopt(const std::string& name,
                                                             int64_t bytes);

  // Unmaps; the owner also removes the name, unless it is kept.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Takes the memory of the first `bytes` from the system now, so that a full
  // /dev/shm is an error here and not a SIGBUS in whoever writes first.
  // RESOURCE_EXHAUSTED naming the bytes.
  absl::Status Commit(int64_t bytes);

  // The name stays when this ends.
  void Keep() { owner_ = false; }

  std::byte* data() { return data_; }
  int64_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }  // empty = anonymous

 private:
  SharedMemory(std::string name, int fd, std::byte* data, int64_t bytes, bool owner)
      : name_(std::move(name)), fd_(fd), data_(data), bytes_(bytes), owner_(owner) {}

  const std::string name_;
  const int fd_;  // -1 = anonymous
  std::byte* const data_;
  const int64_t bytes_;
  bool owner_;
};

}  // namespace heavywater
