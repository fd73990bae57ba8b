// Gloo's view of a RendezvousStore.
#pragma once

#include <gloo/rendezvous/store.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/comm/rendezvous.h"

namespace heavywater {

// Used by one thread, before `deadline`. A failure of the store is thrown, as
// Gloo wants it, and kept in status().
class GlooStore final : public gloo::rendezvous::Store {
 public:
  GlooStore(RendezvousStore& store, std::string key_prefix, absl::Time deadline)
      : store_(store), key_prefix_(std::move(key_prefix)), deadline_(deadline) {}

  void set(const std::string& key, const std::vector<char>& data) override;
  std::vector<char> get(const std::string& key) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

  const absl::Status& status() const { return status_; }
  // What was last set or got under this key; empty when nothing was.
  const std::vector<char>& Seen(const std::string& key) { return seen_[key]; }

 private:
  [[noreturn]] void Fail(absl::Status status);

  RendezvousStore& store_;
  const std::string key_prefix_;
  const absl::Time deadline_;
  absl::Status status_;
  std::map<std::string, std::vector<char>> seen_;
};

}  // namespace heavywater
