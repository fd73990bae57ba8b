// A backend of which only the registration of host memory is asked. It refuses what
// CUDA refuses.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "cache_service/base/mutex.h"
#include "gtest/gtest.h"
#include "worker/backend/host_memory.h"

namespace heavywater {

// Registration on any thread.
class RegisteringBackend final : public HostMemoryBackend {
 public:
  absl::Status RegisterHostMemory(std::span<std::byte> memory) override {
    MutexLock lock(&mutex_);
    if (refuses_) return absl::ResourceExhaustedError("no more host memory to register");
    const Interval added = PagesOf(memory);
    for (const auto& [begin, end] : registered_) {
      EXPECT_TRUE(added.second <= begin || end <= added.first) << "registered twice";
    }
    registered_.insert(added);
    return absl::OkStatus();
  }
  absl::Status UnregisterHostMemory(std::span<std::byte> memory) override {
    MutexLock lock(&mutex_);
    const Interval ended = PagesOf(memory);
    const auto found = registered_.find(ended.first);
    const bool known = found != registered_.end() && found->second == ended.second;
    EXPECT_TRUE(known) << "was not registered";
    if (known) registered_.erase(found);
    return absl::OkStatus();
  }
  // From now on.
  void Refuse() {
    MutexLock lock(&mutex_);
    refuses_ = true;
  }

  int num_registered() const {
    MutexLock lock(&mutex_);
    return static_cast<int>(registered_.size());
  }
  bool IsRegistered(const std::byte* address) const {
    MutexLock lock(&mutex_);
    const auto at = reinterpret_cast<uintptr_t>(address);
    for (const auto& [begin, end] : registered_) {
      if (begin <= at && at < end) return true;
    }
    return false;
  }

  std::string Name() const override { return "registering"; }
  absl::Status Attend(const KvShape&, const AttendParams&, Stream&) override { return NotHere(); }
  absl::Status AttendPrompt(const KvShape&, const PromptParams&, Stream&) override {
    return NotHere();
  }
  absl::Status Select(const SelectParams&, Stream&) override { return NotHere(); }

 private:
  using Interval = std::pair<const uintptr_t, uintptr_t>;

  // CUDA registers whole pages.
  static Interval PagesOf(std::span<std::byte> memory) {
    const auto begin = reinterpret_cast<uintptr_t>(memory.data());
    return {begin / 4096 * 4096, (begin + memory.size() + 4095) / 4096 * 4096};
  }
  static absl::Status NotHere() { return absl::FailedPreconditionError("registers only"); }

  mutable Mutex mutex_;
  std::map<uintptr_t, uintptr_t> registered_ ABSL_GUARDED_BY(mutex_);
  bool refuses_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace heavywater
