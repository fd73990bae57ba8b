// What everything in a simulated system shares: chance, time, messages, a record of
// what has happened.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/cache_service/registry/fake_clock.h"

namespace heavywater {

// What has happened, counted by kind, and as one number: the same for the same seed.
class SimTrace {
 public:
  void Note(std::string_view kind, uint64_t a = 0, uint64_t b = 0);
  uint64_t hash() const { return hash_; }
  const std::map<std::string, int64_t, std::less<>>& counts() const { return counts_; }
  int64_t count(std::string_view kind) const;
  // Each line as it is noted, with its time: for whoever looks into one seed.
  void PrintTo(std::FILE* file, FakeClock* clock) {
    file_ = file;
    clock_ = clock;
  }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;  // FNV-1a
  std::map<std::string, int64_t, std::less<>> counts_;
  std::FILE* file_ = nullptr;
  FakeClock* clock_ = nullptr;
};

// A process that calls the cache service. A dead one hears no answers; what it has
// sent still arrives.
struct SimCaller {
  bool alive = true;
  bool cut_off = false;  // no message comes through, in either direction
};
using SimCallerPtr = std::shared_ptr<SimCaller>;

// Messages take their time, overtake each other and get lost. One thread.
class SimNetwork {
 public:
  using Run = std::function<void()>;

  SimNetwork(std::mt19937_64& random, FakeClock& clock) : random_(random), clock_(clock) {}

  // `process`: which process of the service runs now, 0: none. `handled`: called after
  // each request that it has handled.
  void SetService(std::function<int64_t()> process, Run handled) {
    process_ = std::move(process);
    handled_ = std::move(handled);
  }
  void SetLoss(int one_in) { loss_one_in_ = one_in; }

  void After(absl::Duration delay, Run run);
  // Only while the caller lives.
  void AfterIfAlive(const SimCallerPtr& caller, absl::Duration delay, Run run);
  // Runs what falls due within it, in order of time.
  void RunFor(absl::Duration duration);

  // `service` runs there, and `done` here with its answer, DEADLINE_EXCEEDED or UNAVAILABLE.
  template <typename T>
  void Call(const SimCallerPtr& caller, absl::Duration timeout,
            std::function<absl::StatusOr<T>()> service,
            std::function<void(const absl::StatusOr<T>&)> done);
  // Likewise, where the service answers later.
  template <typename T>
  void CallLater(const SimCallerPtr& caller, absl::Duration timeout,
                 std::function<void(std::function<void(absl::StatusOr<T>)>)> service,
                 std::function<void(const absl::StatusOr<T>&)> done);
  // A call that its caller waits for: it takes no time here. UNAVAILABLE where request or
  // answer got lost; in the second case the service has done it.
  template <typename T>
  absl::StatusOr<T> CallNow(const SimCaller& caller, std::function<absl::StatusOr<T>()> service);

 private:
  struct Event {
    absl::Time at;
    uint64_t order;
    Run run;
    bool operator>(const Event& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };
  bool Loses(const SimCaller& caller);
  absl::Duration Delay();

  std::mt19937_64& random_;
  FakeClock& clock_;
  std::function<int64_t()> process_ = [] { return int64_t{0}; };
  Run handled_ = [] {};
  int loss_one_in_ = 60;
  uint64_t next_order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

// Thrown where the service's process ends: nothing that would have followed is done.
struct SimProcessEnded {};

struct SimWorld {
  explicit SimWorld(uint64_t seed) : random(seed), network(random, clock) {}

  int Between(int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int n) { return random() % static_cast<uint64_t>(n) == 0; }
  absl::Duration Millis(int low, int high) { return absl::Milliseconds(Between(low, high)); }

  std::mt19937_64 random;
  FakeClock clock;
  SimTrace trace;
  SimNetwork network;
  bool calm = false;  // nothing goes wrong any more
};

template <typename T>
void SimNetwork::CallLater(const SimCallerPtr& caller, absl::Duration timeout,
                           std::function<void(std::function<void(absl::StatusOr<T>)>)> service,
                           std::function<void(const absl::StatusOr<T>&)> done) {
  auto waits = std::make_shared<bool>(true);
  std::function<void(const absl::StatusOr<T>&)> answer =
      [caller, waits, done = std::move(done)](const absl::StatusOr<T>& result) {
        if (!*waits || !caller->alive) return;
        *waits = false;
        done(result);
      };
  After(timeout, [answer] { answer(absl::DeadlineExceededError("simulated: no answer")); });
  if (Loses(*caller)) return;
  After(Delay(), [this, caller, service = std::move(service), answer] {
    const int64_t process = process_();
    if (process == 0) {
      answer(absl::UnavailableError("simulated: nobody listens"));
      return;
    }
    try {
      service([this, caller, answer, process](absl::StatusOr<T> result) {
        if (Loses(*caller)) return;
        After(Delay(), [this, answer, process, result = std::move(result)] {
          if (process == process_()) answer(result);
        });
      });
    } catch (const SimProcessEnded&) {
    }
    handled_();
  });
}

template <typename T>
void SimNetwork::Call(const SimCallerPtr& caller, absl::Duration timeout,
                      std::function<absl::StatusOr<T>()> service,
                      std::function<void(const absl::StatusOr<T>&)> done) {
  CallLater<T>(
      caller, timeout,
      [service = std::move(service)](const std::function<void(absl::StatusOr<T>)>& answer) {
        answer(service());
      },
      std::move(done));
}

template <typename T>
absl::StatusOr<T> SimNetwork::CallNow(const SimCaller& caller,
                                      std::function<absl::StatusOr<T>()> service) {
  const int64_t process = process_();
  if (process == 0 || Loses(caller)) return absl::UnavailableError("simulated: not delivered");
  absl::StatusOr<T> result = absl::UnavailableError("simulated: the service has ended");
  try {
    result = service();
  } catch (const SimProcessEnded&) {
  }
  handled_();
  if (process != process_() || Loses(caller)) {
    return absl::UnavailableError("simulated: the answer got lost");
  }
  return result;
}

}  // namespace heavywater
