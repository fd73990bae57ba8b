// Where the time of a step goes, by phase: the account of the thread that runs it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace heavywater {

enum class StepPhase {
  kOutside,    // of any step: not accounted for
  kOther,      // of a step, none of the following
  kMatrices,   // the model's layers, embedding and logits
  kAttention,  // K and V appended, sketches scanned, attended; the scores that the same pass adds
  kScores,     // gains gathered for the reduce, checked, read from it
  kPlan,       // who loses and gains a slot, slots handed over
  kReduce,     // collectives, the wait for slower ranks included
  kReport,     // what the registry is told
};
inline constexpr int kNumStepPhases = 8;
// "matrices", ...
std::string_view StepPhaseName(StepPhase phase);

// Nanoseconds of wall time, by phase; kOutside's is always 0.
using StepPhaseTimes = std::array<int64_t, kNumStepPhases>;

// From here to its end this thread's time counts for `phase`, and for it alone: a scope
// within a scope takes its time from it. Thread-local, so that no interface has to carry
// an account; each scope reads the clock twice, some 50 ns. Where a device works
// asynchronously, what counts is the host's time: queueing, and waiting where it waits.
class StepPhaseScope {
 public:
  explicit StepPhaseScope(StepPhase phase);
  ~StepPhaseScope();
  StepPhaseScope(const StepPhaseScope&) = delete;
  StepPhaseScope& operator=(const StepPhaseScope&) = delete;

 private:
  const StepPhase outer_;
};

// This thread's times since the last call on it.
StepPhaseTimes TakeStepPhaseTimes();

}  // namespace heavywater
