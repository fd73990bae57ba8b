#include "cache_service/tier/stale_slabs.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "cache_service/tier/slab_format.h"

namespace heavywater {
namespace {

// Where POSIX shared memory lies on Linux.
constexpr char kDirectory[] = "/dev/shm";

struct Which {
  bool kept_too = false;
  bool unfinished_too = false;
};

// An owner locks its object before it writes the header: what has a header and
// no lock has lost its owner. The header's magic comes last.
bool IsStale(int fd, Which which) {
  SlabHeader header{};
  const ssize_t got = pread(fd, &header, sizeof(header), 0);
  if (got < 0) return false;
  const bool whole = got == sizeof(header) && header.magic == kSlabMagic;
  const bool unfinished = got == 0 || (got == sizeof(header) && header.magic == 0);
  return (whole || (which.unfinished_too && unfinished)) && flock(fd, LOCK_EX | LOCK_NB) == 0 &&
         (which.kept_too || header.kept == 0);
}

bool RemoveIfStale(const std::string& name, Which which) {
  const int fd = shm_open(("/" + name).c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool removed = IsStale(fd, which) && shm_unlink(("/" + name).c_str()) == 0;
  close(fd);
  return removed;
}

}  // namespace

int RemoveStaleSlabs(const std::string& prefix) {
  int removed = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(kDirectory, error)) {
    const std::string name = entry.path().filename().string();
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    if (RemoveIfStale(name, {})) ++removed;
  }
  return removed;
}

std::vector<WaitingSlab> FindWaitingSlabs(const std::string& prefix) {
  std::vector<WaitingSlab> waiting;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(kDirectory, error)) {
    const std::string name = entry.path().filename().string();
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    const int fd = shm_open(("/" + name).c_str(), O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) continue;
    SlabHeader header{};
    // The lock that shows that nobody has it goes with the descriptor.
    if (IsStale(fd, {.kept_too = true}) &&
        pread(fd, &header, sizeof(header), 0) == sizeof(header) && header.kept != 0) {
      waiting.push_back({name, header.committed_bytes});
    }
    close(fd);
  }
  return waiting;
}

bool RemoveStaleSlab(const std::string& name, bool unfinished_too) {
  return RemoveIfStale(name, {.kept_too = true, .unfinished_too = unfinished_too});
}

}  // namespace heavywater
