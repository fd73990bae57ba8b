#include "worker/rank/gains_region.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

constexpr double kOne = 4294967296.0;  // 2^32: a probability of 1

// Probabilities are rounded to 2^-32 each, and float32 softmaxes sum to 1 within
// some 1e-5. A missing rank takes away 1 / ranks.
constexpr int64_t kToleranceDivisor = 1024;

absl::Status WrongMass(int layer, int row, int64_t got, int64_t wanted) {
  return absl::FailedPreconditionError(
      absl::StrCat("attention received in layer ", layer, ", set ", row, " sums to ",
                   static_cast<double>(got) / kOne, ", want ", static_cast<double>(wanted) / kOne,
                   " (query heads x queries): a rank's contribution is missing or wrong"));
}

}  // namespace

absl::Status CheckMass(const KvShape& shape, Scope scope, const GainsRegion& region,
                       int64_t queries, int first_layer, std::span<const int64_t> buffer,
                       std::span<const int64_t> recalled) {
  const int64_t heads = scope == Scope::kLayer ? shape.total_query_heads
                                               : shape.total_query_heads / shape.total_kv_heads;
  const int64_t wanted = heads * queries << 32;
  const int64_t tolerance = wanted / kToleranceDivisor;
  std::span<const int64_t> rest = buffer.subspan(region.begin, region.size());
  for (int layer = 0; layer < region.num_layers; ++layer) {
    for (int row = 0; row < region.sets.rows(); ++row) {
      int64_t got = recalled.empty() ? 0 : recalled[layer * region.sets.rows() + row];
      for (int64_t gain : rest.first(region.used)) got += gain;
      if (std::abs(got - wanted) > tolerance) {
        return WrongMass(first_layer + layer, row, got, wanted);
      }
      rest = rest.subspan(region.used);
    }
  }
  return absl::OkStatus();
}

}  // namespace heavywater
