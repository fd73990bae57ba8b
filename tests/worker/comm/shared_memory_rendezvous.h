// A rendezvous for processes made by fork().
#pragma once

#include <string>

#include "worker/comm/rendezvous.h"

namespace heavywater {

// Create it before forking; parent and children then see the same keys. Thread
// safe, and safe across those processes.
class SharedMemoryRendezvous final : public RendezvousStore {
 public:
  SharedMemoryRendezvous();
  ~SharedMemoryRendezvous() override;
  absl::Status Put(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Wait(const std::string& key, absl::Duration timeout) override;

 private:
  struct Table;
  Table* const table_;
};

}  // namespace heavywater
