#include "tests/bench/machine_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/machine_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must come after foreach_target.h.
#include "hwy/cache_control.h"
#include "hwy/highway.h"

// Highway insists on compiling the compiler's baseline too; it has no kernels.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kReadBlock = 1024;
constexpr int64_t kLine = 64;

uint64_t Read(const std::byte* from, int64_t bytes, int64_t ahead) {
  const hn::ScalableTag<uint64_t> d;
  constexpr int64_t kVector = hn::MaxLanes(d) * int64_t{sizeof(uint64_t)};
  constexpr int kSums = 8;
  hn::Vec<decltype(d)> sums[kSums];
  for (auto& sum : sums) sum = hn::Zero(d);
  for (const std::byte* const end = from + bytes; from < end; from += kReadBlock) {
    if (ahead > 0) {
      for (int64_t i = 0; i < kReadBlock; i += kLine) hwy::Prefetch(from + ahead + i);
    }
    for (int64_t i = 0; i < kReadBlock; i += kSums * kVector) {
      for (int s = 0; s < kSums; ++s) {
        const auto* at = reinterpret_cast<const uint64_t*>(from + i + s * kVector);
        sums[s] = hn::Xor(sums[s], hn::LoadU(d, at));
      }
    }
  }
  for (int s = 1; s < kSums; ++s) sums[0] = hn::Xor(sums[0], sums[s]);
  return hn::GetLane(hn::SumOfLanes(d, sums[0]));
}

double MultiplyAdd(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  // More chains than latency times issue width (4 x 2), and they fit 16 registers.
  constexpr int kChains = 12;
  const auto factor = hn::Set(d, *sink);
  const auto term = hn::Set(d, 1e-3f);
  hn::Vec<decltype(d)> chains[kChains];
  for (int c = 0; c < kChains; ++c) chains[c] = hn::Set(d, static_cast<float>(c));
  for (int64_t round = 0; round < rounds; ++round) {
    for (auto& chain : chains) chain = hn::MulAdd(chain, factor, term);
  }
  for (int c = 1; c < kChains; ++c) chains[0] = hn::Add(chains[0], chains[c]);
  *sink = hn::GetLane(hn::SumOfLanes(d, chains[0]));
  return 2.0 * static_cast<double>(rounds * kChains) * static_cast<double>(hn::MaxLanes(d));
}

}  // namespace

constexpr MachineKernels kMachineKernels = {.read = Read, .multiply_add = MultiplyAdd};

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();
#endif  // a target with kernels

#if HWY_ONCE
namespace heavywater {

const MachineKernels& MachineKernelsOf(CpuTarget target) {
  return target == CpuTarget::kAvx2 ? N_AVX2::kMachineKernels : N_AVX3::kMachineKernels;
}

}  // namespace heavywater
#endif  // HWY_ONCE
