#include "worker/server/served_generation.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

bool SameQuestion(const GenerationRequest& a, const GenerationRequest& b) {
  return a.tenant == b.tenant && a.prompt == b.prompt && a.suffix == b.suffix &&
         PolicyToProto(a.sequence.policy).SerializeAsString() ==
             PolicyToProto(b.sequence.policy).SerializeAsString();
}

}  // namespace

void ServedGeneration::NoteToken(int32_t token) {
  MutexLock lock(&mutex_);
  tokens_.push_back(token);
}

void ServedGeneration::Cancel(CutOff reason) {
  cut_off_ = reason;
  responses.Cancel();
}

absl::Status ServedGeneration::CancelledStatus() const {
  switch (cut_off_) {
    case CutOff::kSuspended:
      return absl::AbortedError(
          absl::StrCat("sequence ", sequence,
                       " was suspended; a Generate with continue_sequence_id goes on with it"));
    case CutOff::kTakenOver:
      return absl::AbortedError(
          absl::StrCat("sequence ", sequence, " was taken over by a call that resumes it"));
    case CutOff::kByClient:
      break;
  }
  return absl::CancelledError("cancelled by the client");
}

bool ServedGeneration::IsContinuedBy(const GenerationRequest& other) const {
  if (!SameQuestion(request, other)) return false;
  MutexLock lock(&mutex_);
  const auto count = static_cast<std::ptrdiff_t>(std::min(tokens_.size(), other.received.size()));
  return std::equal(tokens_.begin(), tokens_.begin() + count, other.received.begin());
}

}  // namespace heavywater
