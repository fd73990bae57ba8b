// Recall's part of a plan.
#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/rank/sequence_recall.h"

namespace heavywater {

void SequenceRecall::FillRegion(const RecallRegion& region, std::span<int64_t> buffer) const {
  FillAbsent(region, buffer);
  for (int index = 0; index < region.num_layers; ++index) {
    const DemotedLedger& ledger = layers_[index].ledger;
    for (int head = 0; head < rank_.shape.num_kv_heads; ++head) {
      const int row = region.rows == 1 ? 0 : region.first_head + head;
      buffer[region.Mass(index, row)] += ledger.FreshMass(head);
      region.Write(index, region.first_head + head,
                   ledger.LargestGains(head, region.num_candidates, AbsentPages(index, head),
                                       sketch_.page_tokens),
                   buffer);
    }
  }
}

absl::Status SequenceRecall::BeginPlan(int64_t queries, int64_t tokens_seen, bool evicts) {
  clock_ += queries;
  NoteHeat();
  for (Layer& layer : layers_) layer.ledger.MergeGains();
  return sketched() || evicts ? AddPages(tokens_seen) : absl::OkStatus();
}

absl::StatusOr<std::vector<PromotionCandidate>> SequenceRecall::TakeReports(
    int index, int set, const RecallRegion& region, std::span<const int64_t> buffer,
    int64_t promotable_end) {
  Layer& layer = layers_[index];
  std::map<Position, int64_t> gains;
  for (int head = 0; head < region.num_heads; ++head) {
    const int own = head - region.first_head;
    if (num_sets_ > 1 && own != set) continue;
    for (const PositionGain& gain : region.Read(index, head, buffer)) {
      if (gain.position >= layer.ledger.stride()) {
        return absl::FailedPreconditionError(
            absl::StrCat("KV head ", head, " reports position ", gain.position, " in layer ", index,
                         ", want one below ", layer.ledger.stride()));
      }
      gains[gain.position] += gain.gain;
      if (own >= 0 && own < rank_.shape.num_kv_heads) layer.ledger.ClearGain(own, gain.position);
    }
  }
  std::vector<PromotionCandidate> candidates;
  for (const auto& [position, gain] : gains) {
    const double decay = options_.policy.decay;
    const int64_t score = layer.ledger.ScoreAt(set, position, decay, clock_) + gain;
    layer.ledger.SetScore(set, position, score, clock_);
    if (position >= promotable_end || !MayPromote(index, set, position, region, buffer)) continue;
    if (!IsDemoted(layer, set, position)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "position ", position, " is proposed in layer ", index, ", but is not demoted here"));
    }
    candidates.push_back({position, score});
  }
  return candidates;
}

void SequenceRecall::Demote(int index, int set, std::span<const Position> positions,
                            std::span<const int64_t> scores) {
  HW_CHECK(positions.size() == scores.size());
  Layer& layer = layers_[index];
  for (size_t i = 0; i < positions.size(); ++i) {
    MarkDemoted(index, set, positions[i]);
    layer.ledger.SetScore(set, positions[i], scores[i], clock_);
  }
}

// What other heads have not reported of it is forgotten: from here on its score
// is the slot's.
void SequenceRecall::Promote(int index, int set, std::span<const Position> positions) {
  Layer& layer = layers_[index];
  for (const Position position : positions) {
    layer.demoted[set * words_per_set() + position / kSketchBlock] &=
        static_cast<uint16_t>(~(1u << (position % kSketchBlock)));
    for (int head = 0; head < rank_.shape.num_kv_heads; ++head) {
      if (num_sets_ == 1 || head == set) layer.ledger.ClearGain(head, position);
    }
  }
  layer.changed = layer.changed || !positions.empty();
  stats_.promoted += static_cast<int64_t>(positions.size());
}

// Alike in all layers, sets and ranks, whatever they demote.
bool SequenceRecall::NeedsEncoding(int64_t tokens_seen) const {
  return !sketched() || tokens_seen - sketched_tokens_ >= kSketchBlock ||
         tokens_seen / sketch_.page_tokens > sketched_tokens_ / sketch_.page_tokens ||
         tokens_seen - recent_tokens_ > sketched_tokens_;
}

absl::Status SequenceRecall::FinishPlan(int64_t tokens_seen) {
  // Nothing has been demoted yet, or nothing can be read any more.
  if (num_pages() == 0 || !host_pages_.readable()) return absl::OkStatus();
  const bool encodes = NeedsEncoding(tokens_seen);
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    if (!sketched()) HW_RETURN_IF_ERROR(ChooseChannels(layer, tokens_seen));
    if (encodes) {
      // The open page again, from its first position.
      HW_RETURN_IF_ERROR(EncodeLayer(layer, sketched_tokens_ / sketch_.page_tokens, tokens_seen));
    }
    HW_RETURN_IF_ERROR(Upload(layer));
  }
  if (encodes) sketched_tokens_ = tokens_seen;
  squares_ = DeviceBuffer();
  stats_.sketch_bytes = device_bytes();
  return absl::OkStatus();
}

}  // namespace heavywater
