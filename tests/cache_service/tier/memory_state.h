// A state in this process' memory, which a test gives to one store after another.
#pragma once

#include <map>
#include <string>

#include "cache_service/base/mutex.h"
#include "cache_service/tier/state_store.h"

namespace heavywater {

// Thread safe.
class MemoryState final : public StateStore {
 public:
  void Apply(const StateBatch& batch) override {
    MutexLock lock(&mutex_);
    for (const StateBatch::Change& change : batch.changes()) {
      switch (change.kind) {
        case StateBatch::Kind::kPut:
          records_[change.key] = change.value;
          break;
        case StateBatch::Kind::kDelete:
          records_.erase(change.key);
          break;
        case StateBatch::Kind::kDeletePrefix:
          while (true) {
            const auto record = records_.lower_bound(change.key);
            if (record == records_.end() || !record->first.starts_with(change.key)) break;
            records_.erase(record);
          }
      }
    }
  }
  absl::Status broken() const override { return absl::OkStatus(); }
  absl::Status ForEach(const std::string& prefix, const Visit& visit) const override {
    for (const auto& [key, value] : Records()) {
      if (!key.starts_with(prefix)) continue;
      if (const absl::Status status = visit(key, value); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  std::map<std::string, std::string> Records() const {
    MutexLock lock(&mutex_);
    return records_;
  }
  // Behind everybody's back.
  void Set(const std::string& key, const std::string& value) {
    MutexLock lock(&mutex_);
    records_[key] = value;
  }

 private:
  mutable Mutex mutex_;
  std::map<std::string, std::string> records_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
