#include "worker/model/vector_ops.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/model/vector_ops.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h.
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;

// Calls body(d, i) for each whole vector, then body(one lane, i) for the rest.
template <class Body>
HWY_INLINE void ForEachVector(int64_t size, const Body& body) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) body(d, i);
  const hn::CappedTag<float, 1> one;
  for (; i < size; ++i) body(one, i);
}

float SumOfSquares(const float* x, int64_t size) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= size; i += 2 * lanes) {
    const auto a = hn::LoadU(d, x + i);
    const auto b = hn::LoadU(d, x + i + lanes);
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < size; ++i) sum += x[i] * x[i];
  return sum;
}

void RmsNormKernel(const float* x, const float* weight, float epsilon, int64_t size, float* out) {
  const float mean = SumOfSquares(x, size) / static_cast<float>(size);
  const float factor = 1.0f / std::sqrt(mean + epsilon);
  ForEachVector(size, [&](auto d, int64_t i) HWY_ATTR {
    const auto scaled = hn::Mul(hn::LoadU(d, x + i), hn::Set(d, factor));
    hn::StoreU(hn::Mul(scaled, hn::LoadU(d, weight + i)), d, out + i);
  });
}

void SiluMultiplyKernel(const float* gate, const float* up, int64_t size, float* out) {
  ForEachVector(size, [&](auto d, int64_t i) HWY_ATTR {
    const auto g = hn::LoadU(d, gate + i);
    // Below -88 exp(-g) would overflow, and silu is 0 to all digits.
    const auto lowest = hn::Set(d, -88.0f);
    const auto exponential = hn::Exp(d, hn::Neg(hn::Max(g, lowest)));
    const auto quotient = hn::Div(g, hn::Add(hn::Set(d, 1.0f), exponential));
    const auto silu = hn::IfThenElseZero(hn::Ge(g, lowest), quotient);
    hn::StoreU(hn::Mul(silu, hn::LoadU(d, up + i)), d, out + i);
  });
}

void AddToKernel(const float* x, int64_t size, float* sum) {
  ForEachVector(size, [&](auto d, int64_t i) HWY_ATTR {
    hn::StoreU(hn::Add(hn::LoadU(d, sum + i), hn::LoadU(d, x + i)), d, sum + i);
  });
}

void RotateHalvesKernel(const float* x, const float* cosines, const float* sines, int64_t half,
                        float* out) {
  ForEachVector(half, [&](auto d, int64_t i) HWY_ATTR {
    const auto first = hn::LoadU(d, x + i);
    const auto second = hn::LoadU(d, x + half + i);
    const auto cosine = hn::LoadU(d, cosines + i);
    const auto sine = hn::LoadU(d, sines + i);
    hn::StoreU(hn::Sub(hn::Mul(first, cosine), hn::Mul(second, sine)), d, out + i);
    hn::StoreU(hn::Add(hn::Mul(second, cosine), hn::Mul(first, sine)), d, out + half + i);
  });
}

float Largest(const float* x, int64_t size) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto largest = hn::Set(d, x[0]);
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) largest = hn::Max(largest, hn::LoadU(d, x + i));
  float result = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < size; ++i) result = std::max(result, x[i]);
  return result;
}

// Sums in double: there are tens of thousands of terms.
double LogSumExpKernel(const float* x, int64_t size) {
  const hn::ScalableTag<double> wide;
  const hn::Rebind<float, decltype(wide)> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const float largest = Largest(x, size);
  auto sum = hn::Zero(wide);
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    const auto below = hn::Sub(hn::LoadU(d, x + i), hn::Set(d, largest));
    sum = hn::Add(sum, hn::PromoteTo(wide, hn::Exp(d, below)));
  }
  double total = hn::GetLane(hn::SumOfLanes(wide, sum));
  for (; i < size; ++i) total += std::exp(static_cast<double>(x[i]) - largest);
  return largest + std::log(total);
}

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heavywater {

HWY_EXPORT(RmsNormKernel);
HWY_EXPORT(SiluMultiplyKernel);
HWY_EXPORT(AddToKernel);
HWY_EXPORT(RotateHalvesKernel);
HWY_EXPORT(LogSumExpKernel);

void RmsNorm(const float* x, const float* weight, float epsilon, int64_t size, float* out) {
  HWY_DYNAMIC_DISPATCH(RmsNormKernel)(x, weight, epsilon, size, out);
}

void SiluMultiply(const float* gate, const float* up, int64_t size, float* out) {
  HWY_DYNAMIC_DISPATCH(SiluMultiplyKernel)(gate, up, size, out);
}

void AddTo(const float* x, int64_t size, float* sum) {
  HWY_DYNAMIC_DISPATCH(AddToKernel)(x, size, sum);
}

void RotateHalves(const float* x, const float* cosines, const float* sines, int64_t half,
                  float* out) {
  HWY_DYNAMIC_DISPATCH(RotateHalvesKernel)(x, cosines, sines, half, out);
}

double LogSumExp(const float* x, int64_t size) {
  return HWY_DYNAMIC_DISPATCH(LogSumExpKernel)(x, size);
}

}  // namespace heavywater
#endif  // HWY_ONCE
