#include "worker/backend/cuda/recall_report.h"

#include <algorithm>
#include <utility>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater::cuda {
namespace {

constexpr int64_t kListBytes = sizeof(int32_t) + sizeof(float);
constexpr int64_t kPickBytes = sizeof(int64_t) + sizeof(int32_t);

RecallReport CutReport(std::byte* memory, int64_t lists, int64_t first, int64_t count) {
  RecallReport report = {};
  report.first = first;
  report.count = count;
  report.gains = reinterpret_cast<int64_t*>(memory);
  report.num_picks = reinterpret_cast<int32_t*>(report.gains + lists * count);
  report.missing = reinterpret_cast<float*>(report.num_picks + lists);
  report.picks = reinterpret_cast<int32_t*>(report.missing + lists);
  return report;
}

// One KV head of one token.
void DeliverList(const RecallTarget& target, const RecallReport& report, int kv_head, int64_t list,
                 int64_t to) {
  const int64_t num_picks = report.num_picks[list];
  if (report.first == 0) {
    if (!target.num_picks.empty()) target.num_picks[to] = static_cast<int32_t>(num_picks);
    if (!target.missing.empty()) target.missing[to] = report.missing[list];
  }
  const int64_t count = std::min(num_picks - report.first, report.count);
  const int32_t* const picks = report.picks + list * report.count;
  if (!target.gains.empty()) {
    int64_t* const gains = target.gains.data() + kv_head * target.gains_stride;
    for (int64_t i = 0; i < count; ++i) gains[picks[i]] += report.gains[list * report.count + i];
  }
  if (target.picks.empty()) return;
  const int64_t wanted = std::min(count, target.max_picks - report.first);
  for (int64_t i = 0; i < wanted; ++i) {
    target.picks[to * target.max_picks + report.first + i] = picks[i];
  }
}

}  // namespace

RecallTargets TargetsOf(std::span<const AttendItem> items, std::span<const WaveToken> wave,
                        int num_kv_heads) {
  RecallTargets targets;
  targets.num_kv_heads = num_kv_heads;
  for (size_t token = 0; token < wave.size(); ++token) {
    if (wave[token].recall < 0) continue;
    const RecallView& view = *items[wave[token].recall].recall;
    const bool wants_picks = !view.gains.empty() || !view.picks.empty();
    if (!wants_picks && view.num_picks.empty() && view.missing.empty()) continue;
    const int64_t positions = view.num_pages * view.sketch.page_tokens;
    const int64_t most = view.all ? positions : std::min(view.max_picks, positions);
    if (wants_picks) targets.max_picks = std::max(targets.max_picks, most);
    targets.tokens.push_back({.token = static_cast<int64_t>(token),
                              .item_token = wave[token].token,
                              .gains = view.gains,
                              .gains_stride = view.gains_stride,
                              .num_picks = view.num_picks,
                              .picks = view.picks,
                              .max_picks = view.max_picks,
                              .missing = view.missing});
  }
  return targets;
}

int64_t PicksAtOnce(int64_t lists) {
  return (HostResults::kBlockBytes / lists - kListBytes) / kPickBytes;
}

absl::StatusOr<RecallReport> ExpectReport(HostResults& results, const RecallTargets& targets,
                                          int64_t lists, int64_t first, int64_t count,
                                          cudaStream_t stream) {
  const auto deliver = [targets, lists, first,
                        count](std::span<const std::byte> bytes) -> absl::Status {
    const RecallReport report =
        CutReport(const_cast<std::byte*>(bytes.data()), lists, first, count);
    for (const RecallTarget& target : targets.tokens) {
      for (int kv_head = 0; kv_head < targets.num_kv_heads; ++kv_head) {
        DeliverList(target, report, kv_head, target.token * targets.num_kv_heads + kv_head,
                    target.item_token * targets.num_kv_heads + kv_head);
      }
    }
    return absl::OkStatus();
  };
  HW_ASSIGN_OR_RETURN(std::byte* const memory,
                      results.Expect(stream, lists * (kListBytes + count * kPickBytes), deliver));
  return CutReport(memory, lists, first, count);
}

}  // namespace heavywater::cuda
