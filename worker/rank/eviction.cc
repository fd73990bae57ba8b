#include "worker/rank/eviction.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/rank/sequence_memory.h"
#include "worker/rank/workspace.h"

namespace heavywater {
namespace {

class Eviction {
 public:
  Eviction(RankCache& cache, SequenceCache& sequence)
      : cache_(cache),
        sequence_(sequence),
        backend_(cache.backend()),
        num_layers_(cache.options().shape.num_layers),
        num_sets_(sequence.sets().own_sets),
        used_(sequence.used()) {}

  absl::Status Run(const PlanInput& input) {
    HW_RETURN_IF_ERROR(TakeCandidates(input));
    HW_RETURN_IF_ERROR(Allocate());
    for (int layer = 0; layer < num_layers_; ++layer) HW_RETURN_IF_ERROR(Choose(layer));
    HW_RETURN_IF_ERROR(ReadChoice());
    for (int layer = 0; layer < num_layers_; ++layer) {
      for (int set = 0; set < num_sets_; ++set) HW_RETURN_IF_ERROR(HandOver(layer, set));
    }
    return absl::OkStatus();
  }

 private:
  using Candidates = std::vector<PromotionCandidate>;

  int64_t IndexOf(int layer, int set) const { return int64_t{layer} * num_sets_ + set; }
  const Candidates& CandidatesOf(int layer, int set) const {
    return candidates_[IndexOf(layer, set)];
  }

  // `stride_` has room for the most candidates of any set.
  absl::Status TakeCandidates(const PlanInput& input) {
    size_t most = 0;
    candidates_.resize(num_layers_ * num_sets_);
    for (int layer = 0; layer < num_layers_ && input.recall.size() > 0; ++layer) {
      for (int set = 0; set < num_sets_; ++set) {
        HW_ASSIGN_OR_RETURN(Candidates taken,
                            sequence_.recall()->TakeReports(layer, set, input.recall, input.sums,
                                                            input.promotable_end));
        most = std::max(most, taken.size());
        candidates_[IndexOf(layer, set)] = std::move(taken);
      }
    }
    num_candidates_ = static_cast<int64_t>(most);
    stride_ = used_ + num_candidates_;
    max_victims_ = sequence_.tokens_resident() - sequence_.budget().budget_tokens + num_candidates_;
    return absl::OkStatus();
  }

  absl::Status Allocate() {
    Workspace& workspace = cache_.workspace();
    const int64_t rows = int64_t{num_layers_} * num_sets_;
    HW_ASSIGN_OR_RETURN(masks_, workspace.Masks(rows * stride_));
    HW_ASSIGN_OR_RETURN(victims_, workspace.Victims(rows * max_victims_));
    HW_ASSIGN_OR_RETURN(victim_scores_, workspace.VictimScores(rows * max_victims_));
    if (num_candidates_ == 0) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(joined_positions_, workspace.CandidatePositions(num_sets_ * stride_));
    HW_ASSIGN_OR_RETURN(joined_scores_, workspace.CandidateScores(num_sets_ * stride_));
    return absl::OkStatus();
  }

  absl::Status Choose(int layer) {
    const int64_t row = IndexOf(layer, 0);
    const LayerView view = sequence_.View(layer);
    const Budget& budget = sequence_.budget();
    SelectParams select;
    select.positions = view.positions;
    select.scores = view.scores;
    select.stride = view.capacity;
    if (num_candidates_ > 0) {
      HW_RETURN_IF_ERROR(JoinCandidates(layer));
      select.positions = joined_positions_;
      select.scores = joined_scores_;
      select.stride = stride_;
    }
    select.kept = masks_.Sub(row * stride_, num_sets_ * stride_);
    select.num_sets = num_sets_;
    select.count = stride_;
    select.selection = {.budget_tokens = budget.budget_tokens,
                        .sink_tokens = budget.sink_tokens,
                        .recent_tokens = budget.recent_tokens,
                        .tokens_seen = sequence_.tokens_seen()};
    HW_RETURN_IF_ERROR(backend_.Select(select, cache_.stream()));
    VictimsParams victims;
    victims.positions = select.positions;
    victims.scores = select.scores;
    victims.kept = select.kept;
    victims.victims = victims_.Sub(row * max_victims_, num_sets_ * max_victims_);
    victims.victim_scores = victim_scores_.Sub(row * max_victims_, num_sets_ * max_victims_);
    victims.num_sets = num_sets_;
    victims.stride = select.stride;
    victims.kept_stride = stride_;
    victims.used = used_;
    victims.max_victims = max_victims_;
    return backend_.CollectVictims(victims, cache_.stream());
  }

  // Residents' slots and then the candidates. The same memory serves layer after
  // layer: the stream keeps the order.
  absl::Status JoinCandidates(int layer) {
    const LayerView view = sequence_.View(layer);
    for (int set = 0; set < num_sets_; ++set) {
      std::vector<Position> positions(num_candidates_, kNoPosition);
      std::vector<int64_t> scores(num_candidates_, 0);
      const Candidates& candidates = CandidatesOf(layer, set);
      for (size_t i = 0; i < candidates.size(); ++i) {
        positions[i] = candidates[i].position;
        scores[i] = candidates[i].score;
      }
      HW_RETURN_IF_ERROR(Join(view.positions.Sub(set * view.capacity, used_), positions,
                              joined_positions_.Sub(set * stride_, stride_)));
      HW_RETURN_IF_ERROR(Join(view.scores.Sub(set * view.capacity, used_), scores,
                              joined_scores_.Sub(set * stride_, stride_)));
    }
    return absl::OkStatus();
  }

  template <typename T>
  absl::Status Join(DeviceSpan<T> residents, const std::vector<T>& rest, DeviceSpan<T> to) {
    HW_RETURN_IF_ERROR(backend_.CopyOnDevice(DeviceBytes(to.Sub(0, residents.size())),
                                             DeviceBytes(residents), cache_.stream()));
    return backend_.CopyToDevice(DeviceBytes(to.Sub(used_, num_candidates_)),
                                 std::as_bytes(std::span(rest)), cache_.stream());
  }

  absl::Status ReadChoice() {
    HW_RETURN_IF_ERROR(CopyToHost(victims_, chosen_));
    if (sequence_.recall() != nullptr) HW_RETURN_IF_ERROR(CopyToHost(victim_scores_, scores_));
    if (num_candidates_ > 0) HW_RETURN_IF_ERROR(CopyToHost(masks_, kept_));
    return backend_.Synchronize(cache_.stream());
  }

  template <typename T>
  absl::Status CopyToHost(DeviceSpan<T> from, std::vector<T>& to) {
    to.resize(from.size());
    return backend_.CopyToHost(std::as_writable_bytes(std::span(to)), DeviceBytes(from),
                               cache_.stream());
  }

  absl::Status HandOver(int layer, int set) {
    const int64_t first = IndexOf(layer, set) * max_victims_;
    std::span<const int32_t> victims = std::span(chosen_).subspan(first, max_victims_);
    victims = victims.first(std::find(victims.begin(), victims.end(), -1) - victims.begin());
    if (sequence_.recall() != nullptr) {
      std::vector<Position> positions;
      for (const int32_t slot : victims) {
        positions.push_back(sequence_.table(layer, set).positions()[slot]);
      }
      sequence_.recall()->Demote(layer, set, positions,
                                 std::span(scores_).subspan(first, victims.size()));
    }
    HW_RETURN_IF_ERROR(sequence_.ReleaseVictims(layer, set, victims));
    return Promote(layer, set);
  }

  absl::Status Promote(int layer, int set) {
    const Candidates& candidates = CandidatesOf(layer, set);
    std::vector<Position> positions;
    std::vector<int64_t> scores;
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (kept_[IndexOf(layer, set) * stride_ + used_ + static_cast<int64_t>(i)] == 0) continue;
      positions.push_back(candidates[i].position);
      scores.push_back(candidates[i].score);
    }
    return sequence_.Promote(layer, set, positions, scores);
  }

  RankCache& cache_;
  SequenceCache& sequence_;
  Backend& backend_;
  const int num_layers_;
  const int num_sets_;
  const int64_t used_;                     // slots of a set
  std::vector<Candidates> candidates_;     // [num_layers][num_sets]
  int64_t num_candidates_ = 0;             // the most of them
  int64_t stride_ = 0;                     // slots and candidates
  int64_t max_victims_ = 0;                // of a set
  DeviceSpan<uint8_t> masks_;              // [num_layers][num_sets][stride]
  DeviceSpan<int32_t> victims_;            // [num_layers][num_sets][max_victims]
  DeviceSpan<int64_t> victim_scores_;      // likewise
  DeviceSpan<Position> joined_positions_;  // [num_sets][stride], of one layer
  DeviceSpan<int64_t> joined_scores_;      // likewise
  std::vector<int32_t> chosen_;            // victims_ in host memory
  std::vector<int64_t> scores_;            // victim_scores_, with recall
  std::vector<uint8_t> kept_;              // masks_, with candidates
};

}  // namespace

absl::Status Evict(RankCache& cache, SequenceCache& sequence, const PlanInput& input) {
  return Eviction(cache, sequence).Run(input);
}

}  // namespace heavywater
