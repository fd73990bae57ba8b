#include "tests/sim/system/talk.h"

namespace heavywater {

// Below 2^24: the synthetic model hands them on as floats.
int32_t Talk::TokenAt(int64_t position) const {
  return static_cast<int32_t>(((number % 128 * 64 + branch % 64) << 10) + position);
}

uint64_t Talk::TextHash(int64_t tokens) const {
  Digest digest;
  for (int64_t i = 0; i < tokens; ++i) {
    digest.Add(static_cast<uint64_t>(text[static_cast<size_t>(i)]));
  }
  return digest.value();
}

void Talk::CutText(int64_t tokens) {
  text.resize(static_cast<size_t>(tokens));
  digests.erase(digests.upper_bound(tokens), digests.end());
}

void Talk::ForgetPlansAfter(int64_t plan) {
  states.erase(states.upper_bound(plan), states.end());
  sets_of_plan.erase(sets_of_plan.upper_bound(plan), sets_of_plan.end());
}

void Talk::ForgetStates() {
  states.clear();
  sets_of_plan.clear();
  digests.clear();
}

}  // namespace heavywater
