// The thread that keeps room in the tiers.
#pragma once

#include <thread>

#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/ordered_page_store.h"

namespace heavywater {

// Takes the store's turns: one after the other while there is something to do, else
// every `idle`. The store must outlive it. The destructor waits for the turn that is
// under way.
class TierMover {
 public:
  explicit TierMover(OrderedPageStore& store, absl::Duration idle = absl::Milliseconds(50));
  ~TierMover();

 private:
  void Run();

  OrderedPageStore& store_;
  const absl::Duration idle_;
  Mutex mutex_;
  CondVar stopped_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace heavywater
