#include "cache_service/base/step_phases.h"

#include <chrono>
#include <utility>

namespace heavywater {
namespace {

using SteadyClock = std::chrono::steady_clock;

struct Account {
  StepPhase phase = StepPhase::kOutside;
  SteadyClock::time_point since;  // of `phase`, unless that is kOutside
  StepPhaseTimes times = {};

  // What has passed counts for the phase; returns it.
  StepPhase Enter(StepPhase next) {
    const SteadyClock::time_point now = SteadyClock::now();
    if (phase != StepPhase::kOutside) {
      times[static_cast<size_t>(phase)] +=
          std::chrono::duration_cast<std::chrono::nanoseconds>(now - since).count();
    }
    since = now;
    return std::exchange(phase, next);
  }
};

thread_local Account account;

}  // namespace

std::string_view StepPhaseName(StepPhase phase) {
  switch (phase) {
    case StepPhase::kOutside:
      return "outside";
    case StepPhase::kOther:
      return "other";
    case StepPhase::kMatrices:
      return "matrices";
    case StepPhase::kAttention:
      return "attention";
    case StepPhase::kScores:
      return "scores";
    case StepPhase::kPlan:
      return "plan";
    case StepPhase::kReduce:
      return "reduce";
    case StepPhase::kReport:
      return "report";
  }
  return "unknown";
}

StepPhaseScope::StepPhaseScope(StepPhase phase) : outer_(account.Enter(phase)) {}
StepPhaseScope::~StepPhaseScope() { account.Enter(outer_); }

StepPhaseTimes TakeStepPhaseTimes() {
  account.Enter(account.phase);
  return std::exchange(account.times, StepPhaseTimes{});
}

}  // namespace heavywater
