#include "worker/rank/eviction.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/cache/read_device.h"
#include "worker/rank/exposure.h"
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
        num_blocks_(sequence.blocks().num_blocks()),
        num_sets_(sequence.blocks().sets.own_sets),
        used_(sequence.used()),
        most_used_(*std::max_element(used_.begin(), used_.end())),
        ranks_share_sets_(HashGroup(cache.options(), sequence.options().policy.scope) > 1) {}

  absl::Status Run(const PlanInput& input, absl::Duration& wait_left) {
    HW_RETURN_IF_ERROR(TakeCandidates(input));
    HW_RETURN_IF_ERROR(Allocate());
    HW_RETURN_IF_ERROR(ChooseAll());
    if (!AwaitPromoted(wait_left)) HW_RETURN_IF_ERROR(DoWithout());
    for (int block = 0; block < num_blocks_; ++block) {
      for (int set = 0; set < num_sets_; ++set) HW_RETURN_IF_ERROR(HandOver(block, set));
    }
    return absl::OkStatus();
  }

 private:
  using Candidates = std::vector<PromotionCandidate>;

  int64_t IndexOf(int block, int set) const { return int64_t{block} * num_sets_ + set; }
  const Candidates& CandidatesOf(int block, int set) const {
    return candidates_[IndexOf(block, set)];
  }

  int64_t stride(int block) const { return used_[block] + num_candidates_; }

  // Rows of `stride_` have room for the most slots and candidates of any set.
  absl::Status TakeCandidates(const PlanInput& input) {
    size_t most = 0;
    candidates_.resize(num_blocks_ * num_sets_);
    for (int block = 0; block < num_blocks_ && input.recall.size() > 0; ++block) {
      for (int set = 0; set < num_sets_; ++set) {
        HW_ASSIGN_OR_RETURN(Candidates taken,
                            sequence_.recall()->TakeReports(block, set, input.recall, input.sums,
                                                            input.promotable_end));
        most = std::max(most, taken.size());
        candidates_[IndexOf(block, set)] = std::move(taken);
      }
    }
    num_candidates_ = static_cast<int64_t>(most);
    stride_ = most_used_ + num_candidates_;
    for (int block = 0; block < num_blocks_; ++block) {
      const int64_t excess =
          sequence_.table(block, 0).resident() - sequence_.BudgetOf(block).budget_tokens;
      max_victims_ = std::max(max_victims_, excess + num_candidates_);
    }
    return absl::OkStatus();
  }

  absl::Status Allocate() {
    Workspace& workspace = cache_.workspace();
    const int64_t rows = int64_t{num_blocks_} * num_sets_;
    HW_ASSIGN_OR_RETURN(masks_, workspace.Masks(rows * stride_));
    HW_ASSIGN_OR_RETURN(victims_, workspace.Victims(rows * max_victims_));
    HW_ASSIGN_OR_RETURN(victim_scores_, workspace.VictimScores(rows * max_victims_));
    if (num_candidates_ == 0) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(joined_positions_, workspace.CandidatePositions(num_sets_ * stride_));
    HW_ASSIGN_OR_RETURN(joined_scores_, workspace.CandidateScores(num_sets_ * stride_));
    return absl::OkStatus();
  }

  absl::Status ChooseAll() {
    for (int block = 0; block < num_blocks_; ++block) HW_RETURN_IF_ERROR(Choose(block));
    return ReadChoice();
  }

  absl::Status Choose(int block) {
    const int64_t row = IndexOf(block, 0);
    const LayerView view = sequence_.View(block);
    const LayerBudget& budget = sequence_.BudgetOf(block);
    SelectParams select;
    select.positions = view.positions;
    select.scores = view.scores;
    select.stride = view.capacity;
    if (num_candidates_ > 0) {
      HW_RETURN_IF_ERROR(JoinCandidates(block));
      select.positions = joined_positions_;
      select.scores = joined_scores_;
      select.stride = stride(block);
    }
    select.kept = masks_.Sub(row * stride_, num_sets_ * stride(block));
    select.num_sets = num_sets_;
    select.count = stride(block);
    select.selection = {.budget_tokens = budget.budget_tokens,
                        .sink_tokens = sequence_.budget().sink_tokens,
                        .recent_tokens = budget.recent_tokens,
                        .tokens_seen = sequence_.tokens_seen()};
    VictimsParams victims;
    victims.positions = select.positions;
    victims.scores = select.scores;
    if (sequence_.options().policy.exposure > 0) HW_RETURN_IF_ERROR(Expose(block, select));
    HW_RETURN_IF_ERROR(backend_.Select(select, cache_.stream()));
    victims.kept = select.kept;
    victims.victims = victims_.Sub(row * max_victims_, num_sets_ * max_victims_);
    victims.victim_scores = victim_scores_.Sub(row * max_victims_, num_sets_ * max_victims_);
    victims.num_sets = num_sets_;
    victims.stride = select.stride;
    victims.kept_stride = stride(block);
    victims.used = used_[block];
    victims.max_victims = max_victims_;
    return backend_.CollectVictims(victims, cache_.stream());
  }

  // Lets `select` choose by what each query that saw a position gave it. Through the
  // host: a power is the same there on every machine.
  absl::Status Expose(int block, SelectParams& select) {
    const int64_t count = num_sets_ * select.stride;
    HW_ASSIGN_OR_RETURN(const std::vector<Position> positions,
                        ReadDevice(select.positions.Sub(0, count), backend_, cache_.stream()));
    HW_ASSIGN_OR_RETURN(std::vector<int64_t> values,
                        ReadDevice(select.scores.Sub(0, count), backend_, cache_.stream()));
    const int64_t seen = sequence_.tokens_seen();
    for (size_t i = 0; i < values.size(); ++i) {
      if (positions[i] == kNoPosition) continue;
      const int64_t queries =
          seen - std::max<int64_t>(positions[i], sequence_.first_scored_query());
      values[i] = ExposedValue(values[i], queries, sequence_.options().policy.exposure);
    }
    HW_ASSIGN_OR_RETURN(const DeviceSpan<int64_t> exposed, cache_.workspace().ExposedValues(count));
    select.scores = exposed;
    return backend_.CopyToDevice(DeviceBytes(exposed), std::as_bytes(std::span(values)),
                                 cache_.stream());
  }

  // Residents' slots and then the candidates. The same memory serves layer after
  // layer: the stream keeps the order.
  absl::Status JoinCandidates(int block) {
    const LayerView view = sequence_.View(block);
    for (int set = 0; set < num_sets_; ++set) {
      std::vector<Position> positions(num_candidates_, kNoPosition);
      std::vector<int64_t> scores(num_candidates_, 0);
      const Candidates& candidates = CandidatesOf(block, set);
      for (size_t i = 0; i < candidates.size(); ++i) {
        positions[i] = candidates[i].position;
        scores[i] = candidates[i].score;
      }
      const int64_t used = used_[block];
      HW_RETURN_IF_ERROR(Join(view.positions.Sub(set * view.capacity, used), positions,
                              joined_positions_.Sub(set * stride(block), stride(block))));
      HW_RETURN_IF_ERROR(Join(view.scores.Sub(set * view.capacity, used), scores,
                              joined_scores_.Sub(set * stride(block), stride(block))));
    }
    return absl::OkStatus();
  }

  template <typename T>
  absl::Status Join(DeviceSpan<T> residents, const std::vector<T>& rest, DeviceSpan<T> to) {
    HW_RETURN_IF_ERROR(backend_.CopyOnDevice(DeviceBytes(to.Sub(0, residents.size())),
                                             DeviceBytes(residents), cache_.stream()));
    return backend_.CopyToDevice(DeviceBytes(to.Sub(residents.size(), num_candidates_)),
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

  absl::Status HandOver(int block, int set) {
    const int64_t first = IndexOf(block, set) * max_victims_;
    std::span<const int32_t> victims = std::span(chosen_).subspan(first, max_victims_);
    victims = victims.first(std::find(victims.begin(), victims.end(), -1) - victims.begin());
    std::vector<Position> positions;
    for (const int32_t slot : victims) {
      positions.push_back(sequence_.table(block, set).positions()[slot]);
      cache_.eviction_ages().Add(sequence_.tokens_seen() - positions.back());
    }
    if (sequence_.recall() != nullptr) {
      sequence_.recall()->Demote(block, set, positions,
                                 std::span(scores_).subspan(first, victims.size()));
    }
    HW_RETURN_IF_ERROR(sequence_.ReleaseVictims(block, set, victims));
    return Promote(block, set);
  }

  // Of the set's candidates, those that are kept.
  struct Promoted {
    std::vector<Position> positions;
    std::vector<int64_t> scores;
  };
  Promoted PromotedOf(int block, int set) const {
    const Candidates& candidates = CandidatesOf(block, set);
    Promoted promoted;
    for (size_t i = 0; i < candidates.size(); ++i) {
      const int64_t candidate = used_[block] + static_cast<int64_t>(i);
      if (kept_[IndexOf(block, 0) * stride_ + set * stride(block) + candidate] == 0) continue;
      promoted.positions.push_back(candidates[i].position);
      promoted.scores.push_back(candidates[i].score);
    }
    return promoted;
  }

  // Pages of theirs that rest come up first, all together. False: some are lost, or late.
  bool AwaitPromoted(absl::Duration& wait_left) {
    if (num_candidates_ == 0) return true;
    SequenceRecall& recall = *sequence_.recall();
    for (int block = 0; block < num_blocks_; ++block) {
      for (int set = 0; set < num_sets_; ++set) {
        recall.AskForPromoted(block, set, PromotedOf(block, set).positions);
      }
    }
    recall.AwaitAsked(/*spared_layer=*/-1, wait_left);
    for (int block = 0; block < num_blocks_; ++block) {
      for (int set = 0; set < num_sets_; ++set) {
        for (const Position position : PromotedOf(block, set).positions) {
          if (!recall.HasCopies(block, set, position)) return false;
        }
      }
    }
    return true;
  }

  // Who shares its sets with no other rank chooses again, among what is there. Else the others
  // have chosen the same, and have it: the sequence cannot go on here, but takes the same slots,
  // so that what ranks reduce and report stays alike.
  absl::Status DoWithout() {
    if (ranks_share_sets_) {
      sequence_.Break(absl::UnavailableError(
          absl::StrCat("sequence ", sequence_.id(),
                       ": pages that a plan brings up to the device rest below "
                       "host memory, and are lost or have not come in time (recall_wait)")));
      return absl::OkStatus();
    }
    for (int block = 0; block < num_blocks_; ++block) {
      for (int set = 0; set < num_sets_; ++set) {
        std::erase_if(candidates_[IndexOf(block, set)], [&](const PromotionCandidate& candidate) {
          return !sequence_.recall()->HasCopies(block, set, candidate.position);
        });
      }
    }
    return ChooseAll();
  }

  absl::Status Promote(int block, int set) {
    const Promoted promoted = PromotedOf(block, set);
    return sequence_.Promote(block, set, promoted.positions, promoted.scores);
  }

  RankCache& cache_;
  SequenceCache& sequence_;
  Backend& backend_;
  const int num_blocks_;
  const int num_sets_;
  const std::vector<int64_t> used_;  // [num_blocks] slots of a set
  const int64_t most_used_;
  const bool ranks_share_sets_;
  std::vector<Candidates> candidates_;     // [num_blocks][num_sets]
  int64_t num_candidates_ = 0;             // the most of them
  int64_t stride_ = 0;                     // the most slots and candidates
  int64_t max_victims_ = 0;                // of a set
  DeviceSpan<uint8_t> masks_;              // [num_blocks] of num_sets x stride_, in each
                                           // [num_sets][stride(block)] from its beginning
  DeviceSpan<int32_t> victims_;            // [num_blocks][num_sets][max_victims]
  DeviceSpan<int64_t> victim_scores_;      // likewise
  DeviceSpan<Position> joined_positions_;  // [num_sets][stride], of one layer
  DeviceSpan<int64_t> joined_scores_;      // likewise
  std::vector<int32_t> chosen_;            // victims_ in host memory
  std::vector<int64_t> scores_;            // victim_scores_, with recall
  std::vector<uint8_t> kept_;              // masks_, with candidates
};

}  // namespace

absl::Status Evict(RankCache& cache, SequenceCache& sequence, const PlanInput& input,
                   absl::Duration& wait_left) {
  return Eviction(cache, sequence).Run(input, wait_left);
}

}  // namespace heavywater
