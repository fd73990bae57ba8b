#include "worker/model/small_matmul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/model/small_matmul.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After foreach_target.h.
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// kRows x kTokens dot products side by side. Each has one accumulator of its
// own whatever the block's shape, hence the same rounding in every shape; eight
// or more of them hide the latency of FMA.
//
// kPrefetch fetches the next kRows rows: the hardware's prefetchers start anew
// at each row, and rows are short. A prefetch beyond the matrix has no effect.
template <int kRows, int kTokens, bool kPrefetch>
HWY_INLINE void DotBlock(const MatmulArgs& args, int64_t row, int64_t token) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* HWY_RESTRICT weights = args.weights + row * args.cols;
  const float* HWY_RESTRICT x = args.x + token * args.cols;
  V sums[kRows][kTokens];
  for (auto& of_row : sums) {
    for (V& sum : of_row) sum = hn::Zero(d);
  }
  int64_t c = 0;
  for (; c + lanes <= args.cols; c += lanes) {
    V inputs[kTokens];
    for (int t = 0; t < kTokens; ++t) inputs[t] = hn::LoadU(d, x + t * args.cols + c);
    for (int r = 0; r < kRows; ++r) {
      const V weight = hn::LoadU(d, weights + r * args.cols + c);
      if constexpr (kPrefetch) hwy::Prefetch(weights + (r + kRows) * args.cols + c);
      for (int t = 0; t < kTokens; ++t) sums[r][t] = hn::MulAdd(weight, inputs[t], sums[r][t]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) {
      float sum = hn::GetLane(hn::SumOfLanes(d, sums[r][t]));
      for (int64_t i = c; i < args.cols; ++i) {
        sum += weights[r * args.cols + i] * x[t * args.cols + i];
      }
      args.out[(token + t) * args.out_stride + row + r] = sum;
    }
  }
}

// All tokens for kRows rows, which stay in the first-level cache meanwhile.
template <int kRows, int kTokens>
HWY_INLINE void Rows(const MatmulArgs& args, int64_t row) {
  int64_t token = 0;
  if (args.tokens >= kTokens) {
    DotBlock<kRows, kTokens, true>(args, row, 0);
    token = kTokens;
  }
  for (; token + kTokens <= args.tokens; token += kTokens) {
    DotBlock<kRows, kTokens, false>(args, row, token);
  }
  for (; token < args.tokens; ++token) DotBlock<kRows, 1, false>(args, row, token);
}

template <int kRows, int kTokens>
HWY_INLINE void AllRows(const MatmulArgs& args) {
  int64_t row = 0;
  for (; row + kRows <= args.rows; row += kRows) Rows<kRows, kTokens>(args, row);
  for (; row < args.rows; ++row) Rows<1, kTokens>(args, row);
}

void SmallMatmulKernel(const MatmulArgs& args) {
  if (args.tokens == 1) return AllRows<8, 1>(args);
  if (args.tokens < 4) return AllRows<4, 2>(args);
  // 4 x 4 accumulators need AVX-512's 32 registers; 16 hold 2 x 4.
  if constexpr (hn::MaxLanes(D()) >= 16) return AllRows<4, 4>(args);
  AllRows<2, 4>(args);
}

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heavywater {

HWY_EXPORT(SmallMatmulKernel);

void SmallMatmul(const MatmulArgs& args) { HWY_DYNAMIC_DISPATCH(SmallMatmulKernel)(args); }

}  // namespace heavywater
#endif  // HWY_ONCE
