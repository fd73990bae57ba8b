// Which demoted positions a step's queries have read in place.
#include <span>

#include "worker/rank/sequence_recall.h"

namespace heavywater {

void SequenceRecall::CountReads() {
  reads_.assign(num_pages() * sketch_.page_tokens, 0);
  if (options_.policy.recall.all) return CountAllDemoted();
  const int64_t list = options_.policy.recall.recall_tokens;
  for (size_t query = 0; query < num_picks_.size(); ++query) {
    const std::span<const Position> picks =
        std::span(picks_).subspan(query * list, num_picks_[query]);
    for (const Position position : picks) ++reads_[position];
  }
}

std::span<const Position> SequenceRecall::picks(int layer, int64_t token, int head) const {
  if (options_.policy.recall.all) return {};
  const int64_t list = options_.policy.recall.recall_tokens;
  const int64_t query = (layer * step_tokens_ + token) * rank_.shape.num_kv_heads + head;
  return std::span(picks_).subspan(query * list, num_picks_[query]);
}

// In mode `all` queries keep no lists: each has read what its set has demoted. The
// step's plan, which changes that, comes later.
void SequenceRecall::CountAllDemoted() {
  const int64_t queries = step_tokens_ * (num_sets_ == 1 ? rank_.shape.num_kv_heads : 1);
  for (const Layer& layer : layers_) {
    for (int set = 0; set < num_sets_; ++set) {
      for (size_t position = 0; position < reads_.size(); ++position) {
        if (IsDemoted(layer, set, static_cast<Position>(position))) reads_[position] += queries;
      }
    }
  }
}

}  // namespace heavywater
