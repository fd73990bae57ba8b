#include "tests/sim/system/sim_world.h"

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"

namespace heavywater {

void SimTrace::Note(std::string_view kind, uint64_t a, uint64_t b) {
  const auto add = [this](uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3; };
  for (const char letter : kind) add(static_cast<unsigned char>(letter));
  add(a);
  add(b);
  const auto known = counts_.find(kind);
  if (known != counts_.end()) {
    ++known->second;
  } else {
    counts_.emplace(std::string(kind), 1);
  }
  if (file_ == nullptr) return;
  std::fprintf(file_, "%10.3f  %.*s %llu %llu\n",
               absl::ToDoubleSeconds(clock_->Now() - FakeClock().Now()),
               static_cast<int>(kind.size()), kind.data(), static_cast<unsigned long long>(a),
               static_cast<unsigned long long>(b));
}

int64_t SimTrace::count(std::string_view kind) const {
  const auto known = counts_.find(kind);
  return known == counts_.end() ? 0 : known->second;
}

void SimNetwork::After(absl::Duration delay, Run run) {
  events_.push({clock_.Now() + delay, next_order_++, std::move(run)});
}

void SimNetwork::AfterIfAlive(const SimCallerPtr& caller, absl::Duration delay, Run run) {
  After(delay, [caller, run = std::move(run)] {
    if (caller->alive) run();
  });
}

void SimNetwork::RunFor(absl::Duration duration) {
  const absl::Time end = clock_.Now() + duration;
  while (!events_.empty() && events_.top().at <= end) {
    const Run run = events_.top().run;
    if (events_.top().at > clock_.Now()) clock_.Advance(events_.top().at - clock_.Now());
    events_.pop();
    run();
  }
  if (end > clock_.Now()) clock_.Advance(end - clock_.Now());
}

bool SimNetwork::Loses(const SimCaller& caller) {
  return caller.cut_off || (loss_one_in_ > 0 && random_() % loss_one_in_ == 0);
}

// Mostly at once; some overtake others, a few come after everybody has given them up.
absl::Duration SimNetwork::Delay() {
  const uint64_t chance = random_() % 100;
  if (chance < 90) return absl::Milliseconds(1 + random_() % 15);
  if (chance < 98) return absl::Milliseconds(15 + random_() % 400);
  return absl::Milliseconds(400 + random_() % 3000);
}

}  // namespace heavywater
