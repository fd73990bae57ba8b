#include "worker/rank/prompt_attention.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "worker/rank/agreement.h"
#include "worker/rank/prompt_layer.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

enum Field : int64_t { kStatus, kTokens, kHash };  // kPromptFields

}  // namespace

absl::StatusOr<std::unique_ptr<PromptAttention>> PromptAttention::Create(RankCache& cache,
                                                                         SequenceId sequence) {
  HW_ASSIGN_OR_RETURN(SequenceCache * found, cache.Find(sequence));
  HW_RETURN_IF_ERROR(found->BeginPrompt());
  std::unique_ptr<PromptAttention> prompt(new PromptAttention(cache, *found, sequence));
  HW_ASSIGN_OR_RETURN(prompt->whole_, PromptLayer::Create(cache, *found));
  found->NoteBytes(prompt->whole_->bytes());
  return prompt;
}

PromptAttention::PromptAttention(RankCache& cache, SequenceCache& sequence, SequenceId id)
    : cache_(cache), sequence_(sequence), sequence_id_(id) {}

PromptAttention::~PromptAttention() = default;

int64_t PromptAttention::num_tokens() const { return sequence_.options().prompt_tokens; }

int64_t PromptAttention::stored_tokens() const { return sequence_.options().stored_tokens; }

void PromptAttention::LoadStored(int layer) {
  HW_CHECK(!done() && layer >= layer_);
  if (stored_tokens() == 0 || !local_status_.ok()) return;
  local_status_ = whole_->LoadStored(layer, stored_tokens());
}

bool PromptAttention::turns_rows() const { return sequence_.places() != nullptr; }

void PromptAttention::AppendAndAttend(int layer, Position first, int64_t count,
                                      const AttentionRows& rows) {
  HW_CHECK(!done() && layer >= layer_);
  const StepPhaseScope phase(StepPhase::kAttention);
  if (local_status_.ok()) local_status_ = whole_->AppendAndAttend(layer, first, count, rows);
}

absl::Status PromptAttention::BeforeReduce() {
  HW_CHECK(!done());
  const StepPhaseScope phase(StepPhase::kScores);
  if (local_status_.ok()) local_status_ = whole_->CollectSums(layer_);
  Agreement agreement(cache_.options().rank, cache_.options().world_size, kPromptFields);
  agreement.Set(kStatus, static_cast<int64_t>(local_status_.code()));
  agreement.Set(kTokens, num_tokens());
  agreement.Set(kHash, static_cast<int64_t>(sequence_.hash().placement));
  return whole_->WriteAgreement(agreement.entries());
}

DeviceSpan<int64_t> PromptAttention::reduce_buffer() {
  HW_CHECK(!done());
  return whole_->reduce_buffer();
}

absl::Status PromptAttention::CheckAgreement(std::span<const int64_t> entries) {
  Agreement agreement(cache_.options().rank, cache_.options().world_size, kPromptFields);
  std::copy(entries.begin(), entries.end(), agreement.entries().begin());
  const std::string what = absl::StrCat("prompt of sequence ", sequence_id_, ": ");
  HW_RETURN_IF_ERROR(agreement.CheckEqual(kTokens, what + "number of tokens"));
  HW_RETURN_IF_ERROR(agreement.CheckStatus(kStatus, local_status_));
  HW_RETURN_IF_ERROR(
      agreement.CheckEqual(kHash, HashGroup(cache_.options(), sequence_.options().policy.scope),
                           what + "hash of the layers so far"));
  return whole_->CheckReducedSums(layer_);
}

absl::Status PromptAttention::AfterReduce() {
  HW_CHECK(!done());
  const StepPhaseScope phase(StepPhase::kPlan);
  HW_ASSIGN_OR_RETURN(const std::vector<int64_t> entries, whole_->ReadAgreement());
  if (absl::Status status = CheckAgreement(entries); !status.ok()) {
    Break(status);
    return status;
  }
  local_status_ = whole_->Compress(layer_);
  if (!local_status_.ok()) Break(local_status_);
  sequence_.NoteBytes(whole_->bytes());
  ++layer_;
  if (layer_ < cache_.options().shape.num_layers) return absl::OkStatus();
  whole_.reset();
  if (local_status_.ok()) sequence_.FinishPrompt();
  return absl::OkStatus();
}

void PromptAttention::Break(const absl::Status& reason) { sequence_.Break(reason); }

}  // namespace heavywater
