#include "worker/rank/gains_region.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/pivotal.h"

namespace heavywater {
namespace {

constexpr double kOne = 4294967296.0;  // 2^32: a probability of 1

// Probabilities are rounded to 2^-32 each, and float32 softmaxes sum to 1 within
// some 1e-5. A missing rank takes away 1 / ranks.
constexpr double kToleranceDivisor = 1024;

// A sum that no softmax can come to. In doubles, exact for every right sum: what
// NaN leaves behind would overflow an integer.
absl::Status CheckRow(int layer, int row, int64_t sum, int64_t recalled, int64_t wanted) {
  const auto got = static_cast<double>(sum) + static_cast<double>(recalled);
  const auto want = static_cast<double>(wanted);
  const bool negative = sum < 0 || recalled < 0;
  if (!negative && std::abs(got - want) <= want / kToleranceDivisor) return absl::OkStatus();
  const std::string received =
      negative ? "has negative parts" : absl::StrCat("sums to ", got / kOne);
  return absl::FailedPreconditionError(absl::StrCat(
      "attention received in layer ", layer, ", set ", row, " ", received, ", want ", want / kOne,
      " (query heads x queries)", ": a rank's contribution is missing or wrong"));
}

absl::Status CheckCount(int layer, int row, int64_t sum, int64_t most) {
  if (sum >= 0 && sum % kPivotalGain == 0 && sum / kPivotalGain <= most) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("pivotal positions counted in layer ", layer, ", set ", row, " are ",
                   static_cast<double>(sum) / kOne, ", want a whole number of 0 to ", most,
                   " (query heads x queries x slots): a rank's contribution is wrong"));
}

}  // namespace

absl::Status SumGainRows(const GainsRegion& region, DeviceSpan<int64_t> buffer,
                         DeviceSpan<int64_t> to, Backend& backend, Stream& stream) {
  const int rows = region.sets.rows();
  for (int first = 0, end = 0; first < region.num_blocks(); first = end) {
    while (end < region.num_blocks() && region.used[end] == region.used[first]) ++end;
    const int64_t count = int64_t{rows} * (end - first);
    HW_RETURN_IF_ERROR(backend.SumRows(region.Blocks(buffer, first, end - first),
                                       to.Sub(int64_t{rows} * first, count), count,
                                       region.used[first], stream));
  }
  return absl::OkStatus();
}

absl::Status CheckMass(const KvShape& shape, Scope scope, GainKind kind, const GainsRegion& region,
                       int64_t queries, int first_layer, std::span<const int64_t> row_sums,
                       std::span<const int64_t> recalled) {
  const int64_t heads = scope == Scope::kLayer ? shape.total_query_heads
                                               : shape.total_query_heads / shape.total_kv_heads;
  const int64_t wanted = heads * queries << 32;
  HW_CHECK(static_cast<int64_t>(row_sums.size()) == region.num_rows());
  for (int64_t i = 0; i < region.num_rows(); ++i) {
    const int rows_of_layer = region.sets.rows() * region.blocks_per_layer;
    const auto layer = first_layer + static_cast<int>(i / rows_of_layer);
    const auto row = static_cast<int>(i % rows_of_layer);
    if (kind == GainKind::kPivotal) {
      const int64_t used = region.used[i / region.sets.rows()];
      HW_RETURN_IF_ERROR(CheckCount(layer, row, row_sums[i], heads * queries * used));
      continue;
    }
    HW_RETURN_IF_ERROR(
        CheckRow(layer, row, row_sums[i], recalled.empty() ? 0 : recalled[i], wanted));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
