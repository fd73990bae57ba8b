#include "worker/backend/cpu/prompt_kernels.h"

#include <algorithm>
#include <limits>

#include "worker/backend/pivotal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/backend/cpu/prompt_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must come after foreach_target.h.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

// Highway insists on compiling the compiler's baseline too; it has no kernels.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
#include "worker/backend/cpu/fixed_point-inl.h"
HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace {

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
constexpr DF kFloats;
constexpr int kLanes = hn::MaxLanes(DF());
// Rows of accumulators (two vectors each) and operands that fit the registers:
// 32 of them on AVX-512, 16 on AVX2.
constexpr int kMicroRows = kLanes == 16 ? 12 : 6;
constexpr int kMicroColumns = 2 * kLanes;
static_assert(kTileRows % kMicroRows == 0 && kPanelWidth % kMicroColumns == 0);
// Values of this many keys in one panel (32 KiB) stay in L1 while all rows pass.
constexpr int64_t kKeyBlock = 256;

struct Accumulators {
  VF lower[kMicroRows];
  VF upper[kMicroRows];
};

// acc[r] += sum over i of factors(r, i) * panel[i], a row of kMicroColumns.
// Factor (r, i) lies at factors + r * row_stride + i * step.
HWY_INLINE void MultiplyPanel(const float* factors, int64_t row_stride, int64_t step,
                              const float* panel, int64_t count, Accumulators& acc) {
  VF lower[kMicroRows];
  VF upper[kMicroRows];
  for (int r = 0; r < kMicroRows; ++r) {
    lower[r] = acc.lower[r];
    upper[r] = acc.upper[r];
  }
  for (int64_t i = 0; i < count; ++i) {
    const VF x = hn::LoadU(kFloats, panel + i * kPanelWidth);
    const VF y = hn::LoadU(kFloats, panel + i * kPanelWidth + kLanes);
    for (int r = 0; r < kMicroRows; ++r) {
      const VF factor = hn::Set(kFloats, factors[r * row_stride + i * step]);
      lower[r] = hn::MulAdd(factor, x, lower[r]);
      upper[r] = hn::MulAdd(factor, y, upper[r]);
    }
  }
  for (int r = 0; r < kMicroRows; ++r) {
    acc.lower[r] = lower[r];
    acc.upper[r] = upper[r];
  }
}

HWY_INLINE void LoadRows(const float* from, int64_t stride, Accumulators& acc) {
  for (int r = 0; r < kMicroRows; ++r) {
    acc.lower[r] = hn::LoadU(kFloats, from + r * stride);
    acc.upper[r] = hn::LoadU(kFloats, from + r * stride + kLanes);
  }
}

HWY_INLINE void StoreRows(const Accumulators& acc, float* to, int64_t stride) {
  for (int r = 0; r < kMicroRows; ++r) {
    hn::StoreU(acc.lower[r], kFloats, to + r * stride);
    hn::StoreU(acc.upper[r], kFloats, to + r * stride + kLanes);
  }
}

// Logits of all rows and the first `num_keys` keys, a multiple of kPanelWidth.
void TileLogits(const PackedKv& kv, const PromptTile& tile, int64_t num_keys) {
  for (int64_t key = 0; key < num_keys; key += kMicroColumns) {
    const float* panel =
        kv.keys + key / kPanelWidth * kPanelWidth * kv.head_dim + key % kPanelWidth;
    for (int row = 0; row < tile.num_rows; row += kMicroRows) {
      Accumulators acc;
      for (int r = 0; r < kMicroRows; ++r) acc.lower[r] = acc.upper[r] = hn::Zero(kFloats);
      MultiplyPanel(tile.queries + row, 1, kTileRows, panel, kv.head_dim, acc);
      StoreRows(acc, tile.weights + row * tile.weights_stride + key, tile.weights_stride);
    }
  }
}

HWY_INLINE VF VisibleLogits(const float* logits, int64_t key, int64_t visible) {
  const auto mask = hn::FirstN(kFloats, static_cast<size_t>(visible - key));
  return hn::IfThenElse(mask, hn::LoadU(kFloats, logits + key),
                        hn::Set(kFloats, -std::numeric_limits<float>::infinity()));
}

float Maximum(const float* logits, int64_t visible) {
  VF maximum[4];
  for (VF& part : maximum) part = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  int64_t key = 0;
  for (; key + 4 * kLanes <= visible; key += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) {
      maximum[part] = hn::Max(maximum[part], hn::LoadU(kFloats, logits + key + part * kLanes));
    }
  }
  for (; key < visible; key += kLanes) {
    maximum[0] = hn::Max(maximum[0], VisibleLogits(logits, key, visible));
  }
  return hn::GetLane(hn::MaxOfLanes(
      kFloats, hn::Max(hn::Max(maximum[0], maximum[1]), hn::Max(maximum[2], maximum[3]))));
}

// Logits to weights relative to the row's maximum; exactly 0 in
// [visible, num_keys). Returns their sum, in double: the probabilities of a
// query add up to one within their own rounding.
double Softmax(int64_t visible, int64_t num_keys, float* row) {
  const hn::Repartition<double, DF> doubles;
  const hn::Half<DF> half;
  const VF shift = hn::Set(kFloats, Maximum(row, visible));
  auto lower = hn::Zero(doubles);
  auto upper = hn::Zero(doubles);
  const auto exp_and_add = [&](int64_t key, VF logits) HWY_ATTR {
    const VF weight = hn::Exp(kFloats, hn::Sub(logits, shift));
    hn::StoreU(weight, kFloats, row + key);
    lower = hn::Add(lower, hn::PromoteTo(doubles, hn::LowerHalf(half, weight)));
    upper = hn::Add(upper, hn::PromoteTo(doubles, hn::UpperHalf(half, weight)));
  };
  int64_t key = 0;
  for (; key + kLanes <= visible; key += kLanes) {
    exp_and_add(key, hn::LoadU(kFloats, row + key));
  }
  if (key < visible) {
    exp_and_add(key, VisibleLogits(row, key, visible));
    key += kLanes;
  }
  std::fill(row + key, row + num_keys, 0.0f);
  return hn::GetLane(hn::SumOfLanes(doubles, hn::Add(lower, upper)));
}

// out += weights * values, in ascending order of keys.
void TileValues(const PackedKv& kv, const PromptTile& tile, int64_t num_keys) {
  const int64_t out_stride = RoundUpToPanel(kv.head_dim);
  std::fill(tile.out, tile.out + kTileRows * out_stride, 0.0f);
  for (int64_t first = 0; first < num_keys; first += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, num_keys - first);
    for (int64_t column = 0; column < out_stride; column += kMicroColumns) {
      const float* panel = kv.values + (column / kPanelWidth * kv.num_keys + first) * kPanelWidth +
                           column % kPanelWidth;
      for (int row = 0; row < tile.num_rows; row += kMicroRows) {
        float* out = tile.out + row * out_stride + column;
        Accumulators acc;
        LoadRows(out, out_stride, acc);
        MultiplyPanel(tile.weights + row * tile.weights_stride + first, tile.weights_stride, 1,
                      panel, count, acc);
        StoreRows(acc, out, out_stride);
      }
    }
  }
}

// factors[r]: of the rows that add to the gains; 0 for the others.
void AddGains(const PromptTile& tile, const double* factors, int64_t visible) {
  if (!tile.counts_pivotal) {
    return AddFixedPointGains(tile.weights, tile.weights_stride, factors, tile.num_rows, visible,
                              tile.gains);
  }
  double thresholds[kTileRows];
  for (int row = 0; row < tile.num_rows; ++row) {
    thresholds[row] = PivotalThreshold(tile.visible[row] - 1);
  }
  CountPivotal(tile.weights, tile.weights_stride, factors, thresholds, tile.num_rows, visible,
               tile.gains);
}

void AttendTile(const PackedKv& kv, const PromptTile& tile) {
  const int64_t visible = tile.visible[tile.num_rows - 1];
  const int64_t num_keys = RoundUpToPanel(visible);
  TileLogits(kv, tile, num_keys);
  double factors[kTileRows] = {};
  double scored[kTileRows] = {};
  bool any_scored = false;
  // The rows beyond num_rows share registers with real ones: zero weights.
  for (int row = 0; row < kTileRows; ++row) {
    float* weights = tile.weights + row * tile.weights_stride;
    if (row >= tile.num_rows) {
      std::fill(weights, weights + num_keys, 0.0f);
      continue;
    }
    factors[row] = 1.0 / Softmax(tile.visible[row], num_keys, weights);
    scored[row] = tile.scored[row] ? factors[row] : 0.0;
    any_scored |= tile.scored[row];
  }
  TileValues(kv, tile, num_keys);
  const int64_t out_stride = RoundUpToPanel(kv.head_dim);
  for (int row = 0; row < tile.num_rows; ++row) {
    const VF factor = hn::Set(kFloats, static_cast<float>(factors[row]));
    float* out = tile.out + row * out_stride;
    for (int64_t i = 0; i < out_stride; i += kLanes) {
      hn::StoreU(hn::Mul(factor, hn::LoadU(kFloats, out + i)), kFloats, out + i);
    }
  }
  if (any_scored) AddGains(tile, scored, visible);
}

}  // namespace

constexpr PromptKernels kPromptKernels = {.attend_tile = AttendTile};

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();
#endif  // a target with kernels

#if HWY_ONCE
namespace heavywater {

const PromptKernels& PromptKernelsOf(CpuTarget target) {
  return target == CpuTarget::kAvx2 ? N_AVX2::kPromptKernels : N_AVX3::kPromptKernels;
}

}  // namespace heavywater
#endif  // HWY_ONCE
