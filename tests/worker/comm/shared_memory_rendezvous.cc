#include "tests/worker/comm/shared_memory_rendezvous.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/check.h"

namespace heavywater {
namespace {

constexpr int kMaxEntries = 256;
constexpr size_t kMaxKeyBytes = 128;
constexpr size_t kMaxValueBytes = 4096;
constexpr absl::Duration kPollInterval = absl::Milliseconds(1);

struct Entry {
  std::atomic<bool> ready{false};
  size_t value_bytes = 0;
  char key[kMaxKeyBytes] = {};
  char value[kMaxValueBytes] = {};
};

}  // namespace

// Append only: an entry is claimed by number, filled, then marked ready.
struct SharedMemoryRendezvous::Table {
  std::atomic<int> num_claimed{0};
  Entry entries[kMaxEntries];

  static Table* Map() {
    void* const memory =
        mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    HW_CHECK(memory != MAP_FAILED);
    return new (memory) Table;
  }
};

SharedMemoryRendezvous::SharedMemoryRendezvous() : table_(Table::Map()) {}

SharedMemoryRendezvous::~SharedMemoryRendezvous() { munmap(table_, sizeof(Table)); }

absl::Status SharedMemoryRendezvous::Put(const std::string& key, const std::string& value) {
  HW_CHECK(key.size() < kMaxKeyBytes && value.size() <= kMaxValueBytes);
  const int claimed = table_->num_claimed.fetch_add(1);
  HW_CHECK(claimed < kMaxEntries);
  Entry& entry = table_->entries[claimed];
  std::memcpy(entry.key, key.c_str(), key.size() + 1);
  std::memcpy(entry.value, value.data(), value.size());
  entry.value_bytes = value.size();
  entry.ready.store(true, std::memory_order_release);
  return absl::OkStatus();
}

absl::StatusOr<std::string> SharedMemoryRendezvous::Wait(const std::string& key,
                                                         absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  for (;;) {
    for (const Entry& entry : table_->entries) {
      if (!entry.ready.load(std::memory_order_acquire)) continue;
      if (key == entry.key) return std::string(entry.value, entry.value_bytes);
    }
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("nobody put the rendezvous key ", key));
    }
    absl::SleepFor(kPollInterval);
  }
}

}  // namespace heavywater
