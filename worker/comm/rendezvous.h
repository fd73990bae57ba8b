// How ranks find each other: a small key-value store. Workers use GroupService;
// tests use the in-process one.
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

// Thread safe.
class RendezvousStore {
 public:
  virtual ~RendezvousStore() = default;
  virtual absl::Status Put(const std::string& key, const std::string& value) = 0;
  // Waits for the key. DEADLINE_EXCEEDED naming it.
  virtual absl::StatusOr<std::string> Wait(const std::string& key, absl::Duration timeout) = 0;
};

class InProcessRendezvous final : public RendezvousStore {
 public:
  absl::Status Put(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Wait(const std::string& key, absl::Duration timeout) override;

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
