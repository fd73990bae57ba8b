#include "worker/server/generation.h"

#include <algorithm>
#include <cstddef>

#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

bool SameQuestion(const GenerationRequest& a, const GenerationRequest& b) {
  return a.tenant == b.tenant && a.prompt == b.prompt && a.suffix == b.suffix &&
         PolicyToProto(a.sequence.policy).SerializeAsString() ==
             PolicyToProto(b.sequence.policy).SerializeAsString();
}

}  // namespace

void Generation::NoteToken(int32_t token) {
  MutexLock lock(&mutex_);
  tokens_.push_back(token);
}

bool Generation::IsContinuedBy(const GenerationRequest& other) const {
  if (!SameQuestion(request, other)) return false;
  MutexLock lock(&mutex_);
  const auto count = static_cast<std::ptrdiff_t>(std::min(tokens_.size(), other.received.size()));
  return std::equal(tokens_.begin(), tokens_.begin() + count, other.received.begin());
}

}  // namespace heavywater
