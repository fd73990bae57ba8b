#include "worker/rank/promotion.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/cache/read_device.h"
#include "worker/rank/workspace.h"

namespace heavywater {
namespace {

// One layer's plan.
class LayerPlan {
 public:
  LayerPlan(RankCache& cache, SequenceCache& sequence, int layer)
      : cache_(cache), sequence_(sequence), layer_(layer) {}

  absl::Status Run(const PlanInput& input) {
    HW_RETURN_IF_ERROR(TakeCandidates(input));
    HW_RETURN_IF_ERROR(Select());
    HW_ASSIGN_OR_RETURN(const std::vector<int64_t> scores, sequence_.ReadScores(layer_));
    for (int set = 0; set < num_sets(); ++set) {
      const std::span<const uint8_t> kept = std::span(kept_).subspan(set * stride_, stride_);
      Demote(set, kept, std::span(scores).subspan(set * sequence_.capacity()));
      HW_RETURN_IF_ERROR(sequence_.ReleaseVictims(layer_, set, kept.first(used_)));
      HW_RETURN_IF_ERROR(Promote(set, kept.subspan(used_)));
    }
    return absl::OkStatus();
  }

 private:
  int num_sets() const { return sequence_.sets().own_sets; }

  absl::Status TakeCandidates(const PlanInput& input) {
    used_ = stride_ = sequence_.used();
    for (int set = 0; set < num_sets(); ++set) {
      std::vector<PromotionCandidate> candidates;
      if (input.recall.size() > 0) {
        HW_ASSIGN_OR_RETURN(candidates,
                            sequence_.recall()->TakeReports(layer_, set, input.recall, input.sums,
                                                            input.promotable_end));
      }
      stride_ = std::max(stride_, used_ + static_cast<int64_t>(candidates.size()));
      candidates_.push_back(std::move(candidates));
    }
    return absl::OkStatus();
  }

  // Residents' slots and then the candidates, on the device.
  absl::Status Select() {
    Backend& backend = cache_.backend();
    const LayerView view = sequence_.View(layer_);
    const int64_t count = num_sets() * stride_;
    HW_ASSIGN_OR_RETURN(const auto positions, cache_.workspace().CandidatePositions(count));
    HW_ASSIGN_OR_RETURN(const auto scores, cache_.workspace().CandidateScores(count));
    HW_ASSIGN_OR_RETURN(const auto mask, cache_.workspace().Masks(count));
    for (int set = 0; set < num_sets(); ++set) {
      HW_RETURN_IF_ERROR(Join(view.positions.Sub(set * view.capacity, used_), Positions(set),
                              positions.Sub(set * stride_, stride_)));
      HW_RETURN_IF_ERROR(Join(view.scores.Sub(set * view.capacity, used_), Scores(set),
                              scores.Sub(set * stride_, stride_)));
    }
    const Budget& budget = sequence_.budget();
    SelectParams params;
    params.positions = positions;
    params.scores = scores;
    params.kept = mask;
    params.num_sets = num_sets();
    params.stride = params.count = stride_;
    params.selection = {.budget_tokens = budget.budget_tokens,
                        .sink_tokens = budget.sink_tokens,
                        .recent_tokens = budget.recent_tokens,
                        .tokens_seen = sequence_.tokens_seen()};
    HW_RETURN_IF_ERROR(backend.Select(params, cache_.stream()));
    HW_ASSIGN_OR_RETURN(kept_, ReadDevice(mask, backend, cache_.stream()));
    return absl::OkStatus();
  }

  template <typename T>
  absl::Status Join(DeviceSpan<T> residents, const std::vector<T>& rest, DeviceSpan<T> to) {
    Backend& backend = cache_.backend();
    HW_RETURN_IF_ERROR(backend.CopyOnDevice(DeviceBytes(to.Sub(0, residents.size())),
                                            DeviceBytes(residents), cache_.stream()));
    return backend.CopyToDevice(DeviceBytes(to.Sub(used_, stride_ - used_)),
                                std::as_bytes(std::span(rest)), cache_.stream());
  }

  // Of the candidates, padded with free entries.
  std::vector<Position> Positions(int set) const {
    std::vector<Position> positions(stride_ - used_, kNoPosition);
    for (size_t i = 0; i < candidates_[set].size(); ++i) {
      positions[i] = candidates_[set][i].position;
    }
    return positions;
  }
  std::vector<int64_t> Scores(int set) const {
    std::vector<int64_t> scores(stride_ - used_, 0);
    for (size_t i = 0; i < candidates_[set].size(); ++i) scores[i] = candidates_[set][i].score;
    return scores;
  }

  void Demote(int set, std::span<const uint8_t> kept, std::span<const int64_t> scores) {
    const SlotTable& table = sequence_.table(layer_, set);
    std::vector<Position> positions;
    std::vector<int64_t> victims_scores;
    for (const int32_t slot : table.Victims(kept.first(used_))) {
      positions.push_back(table.positions()[slot]);
      victims_scores.push_back(scores[slot]);
    }
    sequence_.recall()->Demote(layer_, set, positions, victims_scores);
  }

  absl::Status Promote(int set, std::span<const uint8_t> kept) {
    std::vector<Position> positions;
    std::vector<int64_t> scores;
    for (size_t i = 0; i < candidates_[set].size(); ++i) {
      if (kept[i] == 0) continue;
      positions.push_back(candidates_[set][i].position);
      scores.push_back(candidates_[set][i].score);
    }
    return sequence_.Promote(layer_, set, positions, scores);
  }

  RankCache& cache_;
  SequenceCache& sequence_;
  const int layer_;
  int64_t used_ = 0;                                         // slots of a set
  int64_t stride_ = 0;                                       // with the candidates
  std::vector<std::vector<PromotionCandidate>> candidates_;  // [num_sets]
  std::vector<uint8_t> kept_;                                // [num_sets][stride]
};

}  // namespace

absl::Status EvictAndPromote(RankCache& cache, SequenceCache& sequence, const PlanInput& input) {
  for (int layer = 0; layer < cache.options().shape.num_layers; ++layer) {
    HW_RETURN_IF_ERROR(LayerPlan(cache, sequence, layer).Run(input));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
