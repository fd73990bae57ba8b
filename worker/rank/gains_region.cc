#include "worker/rank/gains_region.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr double kOne = 4294967296.0;  // 2^32: a probability of 1

// Probabilities are rounded to 2^-32 each, and float32 softmaxes sum to 1 within
// some 1e-5. A missing rank takes away 1 / ranks.
constexpr double kToleranceDivisor = 1024;

// A sum that no softmax can come to. In doubles, exact for every right sum: what
// NaN leaves behind would overflow an integer.
absl::Status CheckRow(int layer, int row, std::span<const int64_t> gains, int64_t recalled,
                      int64_t wanted) {
  auto got = static_cast<double>(recalled);
  bool negative = recalled < 0;
  for (int64_t gain : gains) {
    got += static_cast<double>(gain);
    negative = negative || gain < 0;
  }
  const auto want = static_cast<double>(wanted);
  if (!negative && std::abs(got - want) <= want / kToleranceDivisor) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "attention received in layer ", layer, ", set ", row, " sums to ", got / kOne, ", want ",
      want / kOne, " (query heads x queries)", negative ? " without negative parts" : "",
      ": a rank's contribution is missing or wrong"));
}

}  // namespace

absl::Status CheckMass(const KvShape& shape, Scope scope, const GainsRegion& region,
                       int64_t queries, int first_layer, std::span<const int64_t> buffer,
                       std::span<const int64_t> recalled) {
  const int64_t heads = scope == Scope::kLayer ? shape.total_query_heads
                                               : shape.total_query_heads / shape.total_kv_heads;
  const int64_t wanted = heads * queries << 32;
  std::span<const int64_t> rest = buffer.subspan(region.begin, region.size());
  for (int layer = 0; layer < region.num_layers; ++layer) {
    for (int row = 0; row < region.sets.rows(); ++row) {
      const int64_t elsewhere = recalled.empty() ? 0 : recalled[layer * region.sets.rows() + row];
      HW_RETURN_IF_ERROR(
          CheckRow(first_layer + layer, row, rest.first(region.used), elsewhere, wanted));
      rest = rest.subspan(region.used);
    }
  }
  return absl::OkStatus();
}

}  // namespace heavywater
