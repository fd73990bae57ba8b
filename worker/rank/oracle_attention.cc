#include "worker/rank/oracle_attention.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/cache/read_device.h"
#include "worker/rank/workspace.h"

namespace heavywater {
namespace {

// One token's attention in one layer.
class TopAttention {
 public:
  TopAttention(RankCache& cache, const SequenceCache& sequence, int layer, const AttendItem& item,
               const AttendParams& params)
      : cache_(cache),
        backend_(cache.backend()),
        budget_(sequence.budget()),
        sequence_(sequence),
        layer_(layer),
        item_(item),
        params_(params) {}

  absl::Status Run() {
    FillVisible();
    HW_RETURN_IF_ERROR(AttendToAll());
    if (visible_ <= budget_.attended_tokens) return absl::OkStatus();
    HW_RETURN_IF_ERROR(Choose());
    item_.layer.positions = positions_;
    item_.accumulate_gains = false;
    return Attend();
  }

 private:
  const LayerView& view() const { return item_.layer; }

  // What this query may see: not the later tokens of its append.
  void FillVisible() {
    of_slots_.assign(view().num_sets * view().capacity, kNoPosition);
    for (int set = 0; set < view().num_sets; ++set) {
      const std::span<const Position> positions = sequence_.table(layer_, set).positions();
      visible_ = 0;  // as many in every set
      for (size_t slot = 0; slot < positions.size(); ++slot) {
        if (positions[slot] == kNoPosition || positions[slot] > item_.first_position) continue;
        of_slots_[set * view().capacity + slot] = positions[slot];
        ++visible_;
      }
    }
  }

  absl::Status AttendToAll() {
    item_.accumulate_gains = true;
    item_.gains = GainKind::kProbability;
    return Attend();
  }

  absl::Status Attend() {
    params_.items = std::span(&item_, 1);
    return backend_.Attend(cache_.options().shape, params_, cache_.stream());
  }

  // By what the first pass has paid; leaves in positions_ what is chosen.
  absl::Status Choose() {
    const int64_t used = view().used;
    HW_ASSIGN_OR_RETURN(const DeviceSpan<int64_t> paid,
                        cache_.workspace().CandidateScores(view().num_sets * used));
    HW_RETURN_IF_ERROR(
        backend_.CollectGains(cache_.options().shape, view(), paid, cache_.stream()));
    HW_RETURN_IF_ERROR(UploadPositions(used));
    SelectParams select;
    select.positions = positions_;
    select.scores = paid;
    HW_ASSIGN_OR_RETURN(select.kept, cache_.workspace().Masks(view().num_sets * used));
    select.num_sets = view().num_sets;
    select.stride = used;
    select.count = used;
    select.selection = {.budget_tokens = budget_.attended_tokens,
                        .sink_tokens = budget_.sink_tokens,
                        .recent_tokens = budget_.recent_tokens,
                        .tokens_seen = item_.first_position + 1};
    HW_RETURN_IF_ERROR(backend_.Select(select, cache_.stream()));
    HW_ASSIGN_OR_RETURN(
        const std::vector<uint8_t> kept,
        ReadDevice(DeviceSpan<const uint8_t>(select.kept), backend_, cache_.stream()));
    for (int set = 0; set < view().num_sets; ++set) {
      for (int64_t slot = 0; slot < used; ++slot) {
        if (kept[set * used + slot] == 0) of_slots_[set * view().capacity + slot] = kNoPosition;
      }
    }
    return UploadPositions(view().capacity);
  }

  // of_slots_ into positions_, `stride` of each set.
  absl::Status UploadPositions(int64_t stride) {
    std::vector<Position> packed;
    for (int set = 0; set < view().num_sets; ++set) {
      const auto first = of_slots_.begin() + set * view().capacity;
      packed.insert(packed.end(), first, first + stride);
    }
    HW_ASSIGN_OR_RETURN(positions_,
                        cache_.workspace().CandidatePositions(static_cast<int64_t>(packed.size())));
    return backend_.CopyToDevice(DeviceBytes(positions_), std::as_bytes(std::span(packed)),
                                 cache_.stream());
  }

  RankCache& cache_;
  Backend& backend_;
  const Budget& budget_;
  const SequenceCache& sequence_;
  const int layer_;
  AttendItem item_;
  AttendParams params_;
  int64_t visible_ = 0;             // of each set
  std::vector<Position> of_slots_;  // [num_sets][capacity]
  DeviceSpan<Position> positions_;
};

}  // namespace

absl::Status CheckOracle(const RankCacheOptions& options, const SequenceOptions& sequence) {
  if (sequence.policy.policy != Policy::kOracle || options.ranks_per_kv_head() == 1) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "policy is oracle, but ", options.world_size, " ranks share the model's ",
      options.shape.total_kv_heads, " KV heads; want at most as many ranks as KV heads"));
}

int64_t OracleBytes(const KvShape& shape, const Budget& budget, int64_t capacity) {
  if (budget.attended_tokens == 0) return 0;
  return shape.num_kv_heads * capacity *
         int64_t{sizeof(int64_t) + sizeof(Position) + sizeof(uint8_t)};
}

absl::Status AttendToTheTop(RankCache& cache, const SequenceCache& sequence, int layer,
                            const AttendItem& item, AttendParams params) {
  for (int64_t token = 0; token < item.num_tokens; ++token) {
    AttendItem one = item;
    one.first_token += token;
    one.first_position += static_cast<Position>(token);
    one.num_tokens = 1;
    HW_RETURN_IF_ERROR(TopAttention(cache, sequence, layer, one, params).Run());
    // What the first pass paid is of no use to anybody.
    HW_RETURN_IF_ERROR(cache.backend().Zero(DeviceBytes(item.layer.gains), cache.stream()));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
