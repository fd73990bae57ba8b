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

// An owner locks its object before it writes the header: what has a header and
// no lock has lost its owner.
bool IsStale(int fd, bool kept_too) {
  SlabHeader header{};
  return pread(fd, &header, sizeof(header), 0) == sizeof(header) && header.magic == kSlabMagic &&
         flock(fd, LOCK_EX | LOCK_NB) == 0 && (kept_too || header.kept == 0);
}

bool RemoveIfStale(const std::string& name, bool kept_too) {
  const int fd = shm_open(("/" + name).c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool removed = IsStale(fd, kept_too) && shm_unlink(("/" + name).c_str()) == 0;
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
    if (RemoveIfStale(name, /*kept_too=*/false)) ++removed;
  }
  return removed;
}

bool RemoveStaleSlab(const std::string& name) { return RemoveIfStale(name, /*kept_too=*/true); }

}  // namespace heavywater
