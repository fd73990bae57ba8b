#include "worker/backend/cpu/scan_kernels.h"

#include <cmath>
#include <type_traits>

#include "worker/backend/sketch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/backend/cpu/scan_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must come after foreach_target.h.
#include "hwy/highway.h"

// Highway insists on compiling the compiler's baseline too; it has no kernels.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#include "worker/backend/cpu/exp-inl.h"
HWY_BEFORE_NAMESPACE();
#if HWY_TARGET == HWY_AVX3_DL
// Machines of this target have it, but Highway's list of options does not.
#pragma GCC push_options
#pragma GCC target("avx512vnni")
#endif
namespace heavywater {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using DU8 = hn::Repartition<uint8_t, DF>;
using DI16 = hn::Repartition<int16_t, DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
constexpr DF kFloats;
constexpr DI kInts;
constexpr DU8 kBytes;
constexpr int kLanes = hn::MaxLanes(DF());
constexpr int kHeadsAtOnce = 4;
// Vectors that cover the positions of a block.
constexpr int kParts = kSketchBlock / kLanes;
// Bytes that code 8 channels of a block.
constexpr int kGroupBytes = kSketchBlock * 4;
// Far above any share that could matter, far below what float can hold a sum of.
constexpr float kLargestExponent = 80;

HWY_INLINE VF LoadHalves(const uint16_t* from) {
  const hn::Rebind<hwy::float16_t, DF> halves;
  const hn::Rebind<uint16_t, DF> bits;
  return hn::PromoteTo(kFloats, hn::BitCast(halves, hn::LoadU(bits, from)));
}

// Sums of four products each of codes (0 .. 15) and weights, as int32 lanes.
// Without VNNI, pairs are summed in int16 first: at most 2 * 15 * 127 each, so
// that eight of them fit.
class ByteProducts {
 public:
  HWY_INLINE ByteProducts() : sum_(hn::Zero(DI())), pairs_(hn::Zero(DI16())) {}
#if HWY_TARGET == HWY_AVX3_DL
  HWY_INLINE void Add(hn::Vec<DU8> codes, VI weights) {
    sum_.raw = _mm512_dpbusd_epi32(sum_.raw, codes.raw, weights.raw);
  }
  HWY_INLINE void Widen() {}
#else
  HWY_INLINE void Add(hn::Vec<DU8> codes, VI weights) {
#if HWY_TARGET == HWY_AVX2
    pairs_.raw = _mm256_add_epi16(pairs_.raw, _mm256_maddubs_epi16(codes.raw, weights.raw));
#else
    pairs_.raw = _mm512_add_epi16(pairs_.raw, _mm512_maddubs_epi16(codes.raw, weights.raw));
#endif
  }
  // After every eight calls of Add(), and at the end.
  HWY_INLINE void Widen() {
#if HWY_TARGET == HWY_AVX2
    const __m256i quads = _mm256_madd_epi16(pairs_.raw, _mm256_set1_epi16(1));
    sum_.raw = _mm256_add_epi32(sum_.raw, quads);
#else
    const __m512i quads = _mm512_madd_epi16(pairs_.raw, _mm512_set1_epi16(1));
    sum_.raw = _mm512_add_epi32(sum_.raw, quads);
#endif
    pairs_ = hn::Zero(DI16());
  }
#endif
  HWY_INLINE VI sum() const { return sum_; }

 private:
  VI sum_;
  hn::Vec<DI16> pairs_;
};

// Calls body(integral_constant<int, heads>, first_head) over runs of heads.
template <class Body>
HWY_INLINE void ForHeads(int num_heads, const Body& body) {
  int first = 0;
  for (; first + kHeadsAtOnce <= num_heads; first += kHeadsAtOnce) {
    body(std::integral_constant<int, kHeadsAtOnce>(), first);
  }
  switch (num_heads - first) {
    case 3:
      return body(std::integral_constant<int, 3>(), first);
    case 2:
      return body(std::integral_constant<int, 2>(), first);
    case 1:
      return body(std::integral_constant<int, 1>(), first);
    default:
      return;
  }
}

// acc[h] += the queries' products with a row of halves. Rows of either are
// followed by what they may be read into: zeros, or the page's next table.
template <int kHeads>
HWY_INLINE void AddDots(const float* queries, int padded, const uint16_t* row, VF (&acc)[kHeads]) {
  for (int i = 0; i < padded; i += kLanes) {
    const VF values = LoadHalves(row + i);
    for (int h = 0; h < kHeads; ++h) {
      acc[h] = hn::MulAdd(hn::LoadU(kFloats, queries + h * padded + i), values, acc[h]);
    }
  }
}

template <int kHeads>
HWY_INLINE void WeighHeads(const ScanQuery& query, const SketchPage& page, int first_head) {
  const SketchShape& sketch = query.sketch;
  const int num_chosen = static_cast<int>(PaddedRow(sketch.channels));
  const int num_others = static_cast<int>(PaddedRow(sketch.head_dim - sketch.channels));
  const float* chosen = query.chosen + first_head * num_chosen;
  VF constants[kHeads];
  VF maxima[kHeads];
  for (int h = 0; h < kHeads; ++h) constants[h] = maxima[h] = hn::Zero(kFloats);
  AddDots<kHeads>(chosen, num_chosen, page.minima, constants);
  AddDots<kHeads>(query.others + first_head * num_others, num_others, page.means, constants);
  for (int i = 0; i < num_chosen; i += kLanes) {
    const VF steps = LoadHalves(page.steps + i);
    for (int h = 0; h < kHeads; ++h) {
      const VF product = hn::Mul(hn::LoadU(kFloats, chosen + h * num_chosen + i), steps);
      maxima[h] = hn::Max(maxima[h], hn::Abs(product));
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    const float maximum = hn::GetLane(hn::MaxOfLanes(kFloats, maxima[h]));
    const bool flat = maximum < kLeastProduct;
    query.constants[first_head + h] = hn::GetLane(hn::SumOfLanes(kFloats, constants[h]));
    query.units[first_head + h] = flat ? 0 : maximum / 127.0f;
    maxima[h] = hn::Set(kFloats, flat ? 0 : 127.0f / maximum);
  }
  const hn::Rebind<int8_t, DF> weights;
  for (int i = 0; i < num_chosen; i += kLanes) {
    const VF steps = LoadHalves(page.steps + i);
    for (int h = 0; h < kHeads; ++h) {
      const VF product = hn::Mul(hn::LoadU(kFloats, chosen + h * num_chosen + i), steps);
      const VI nearest = hn::NearestInt(hn::Mul(product, maxima[h]));
      hn::StoreU(hn::DemoteTo(weights, nearest), weights,
                 query.weights + (first_head + h) * num_chosen + i);
    }
  }
}

// Constants, units and weights of the page.
SketchPage WeighPage(const ScanQuery& query, const std::byte* bytes) {
  const SketchPage page = SketchPageAt(query.sketch, bytes);
  ForHeads(query.num_heads, [&](auto heads, int first_head)
                                HWY_ATTR { WeighHeads<heads()>(query, page, first_head); });
  return page;
}

HWY_INLINE VI Weights(const int8_t* weights, int group) {
  int32_t four;
  std::memcpy(&four, weights + 4 * group, sizeof(four));
  return hn::Set(kInts, four);
}

// Sums of one part of a block for kHeads heads; `codes` begins at the part.
template <int kHeads>
HWY_INLINE void SumPart(const uint8_t* codes, int channels, const int8_t* weights,
                        int64_t weights_stride, ByteProducts (&sums)[kHeads]) {
  const auto low_bits = hn::Set(kBytes, uint8_t{0xf});
  const hn::Repartition<uint16_t, DF> words;
  const auto add_group = [&](int group) HWY_ATTR {
    const auto both = hn::LoadU(kBytes, codes + group * kGroupBytes);
    const auto low = hn::And(both, low_bits);
    const auto shifted = hn::BitCast(kBytes, hn::ShiftRight<4>(hn::BitCast(words, both)));
    const auto high = hn::And(shifted, low_bits);
    for (int h = 0; h < kHeads; ++h) {
      sums[h].Add(low, Weights(weights + h * weights_stride, 2 * group));
      sums[h].Add(high, Weights(weights + h * weights_stride, 2 * group + 1));
    }
  };
  const int num_groups = channels / 8;
  for (int group = 0; group < num_groups; ++group) {
    add_group(group);
    if (group % 4 == 3 || group + 1 == num_groups) {
      for (ByteProducts& sum : sums) sum.Widen();
    }
  }
}

// query.sums of one block. Calls visit(head, part, its sums) for each.
template <class Visit>
HWY_INLINE void SumBlock(const ScanQuery& query, const uint8_t* codes, const Visit& visit) {
  const int64_t stride = PaddedRow(query.sketch.channels);
  ForHeads(query.num_heads, [&](auto heads, int first_head) HWY_ATTR {
    for (int part = 0; part < kParts; ++part) {
      ByteProducts sums[heads()];
      SumPart<heads()>(codes + part * kLanes * 4, query.sketch.channels,
                       query.weights + first_head * stride, stride, sums);
      for (int h = 0; h < heads(); ++h) {
        const int head = first_head + h;
        hn::StoreU(sums[h].sum(), kInts, query.sums + head * kSketchBlock + part * kLanes);
        visit(head, part, sums[h].sum());
      }
    }
  });
}

// Estimated shares of the part's positions, from query.sums.
HWY_INLINE VF Shares(const ScanQuery& query, int head, int part) {
  const VI sums = hn::LoadU(kInts, query.sums + head * kSketchBlock + part * kLanes);
  const VF constant = hn::Set(kFloats, query.constants[head] - query.lse[head]);
  const VF exponent =
      hn::MulAdd(hn::Set(kFloats, query.units[head]), hn::ConvertTo(kFloats, sums), constant);
  return ExpOfLogit(kFloats, hn::Min(exponent, hn::Set(kFloats, kLargestExponent)));
}

// More than float errors of an estimated logit.
HWY_INLINE float Margin(const ScanQuery& query, int head) {
  return 1e-3f + 1e-5f * (std::abs(query.lse[head]) + std::abs(query.constants[head]));
}

// Shares by chords of the powers of two, at most 6.2 % too large, never too small: an exponent
// with 7 bits of fraction is a float's upper half. These come out of a sum with 1.5 * 2^23.
constexpr float kLog2E = 0x1.715476p0f;
constexpr float kChordOne = 128;
constexpr float kChordMagic = 0x1.8p23f;
// Float errors of the chords' sum stay below this.
constexpr float kChordSlack = 0.98f;

void SetChords(const ScanQuery& query) {
  for (int head = 0; head < query.num_heads; ++head) {
    const float constant = query.constants[head] - query.lse[head] + Margin(query, head);
    query.offsets[head] = (constant * kLog2E + 127.0f) * kChordOne + kChordMagic;
    query.slopes[head] = query.units[head] * kLog2E * kChordOne;
  }
}

HWY_INLINE VF ChordShares(const ScanQuery& query, int head, VI sums) {
  const VF least = hn::Set(kFloats, kChordMagic);
  const VF largest = hn::Set(kFloats, kChordMagic + 254 * kChordOne);
  const VF shifted = hn::MulAdd(hn::Set(kFloats, query.slopes[head]), hn::ConvertTo(kFloats, sums),
                                hn::Set(kFloats, query.offsets[head]));
  const VF inside = hn::Min(hn::Max(shifted, least), largest);
  return hn::BitCast(kFloats, hn::ShiftLeft<16>(hn::BitCast(kInts, inside)));
}

HWY_INLINE uint32_t BitsOf(hn::Mask<DF> mask) {
#if HWY_TARGET == HWY_AVX2
  return static_cast<uint32_t>(_mm256_movemask_ps(hn::VecFromMask(kFloats, mask).raw));
#else
  return mask.raw;
#endif
}

// query.sums of one block; bit i of the result: the estimated shares of position i may
// have a sum over the heads of at least `total`.
HWY_INLINE uint32_t MayReach(const ScanQuery& query, const uint8_t* codes, float total) {
  VF shares[kParts];
  for (VF& of_part : shares) of_part = hn::Zero(kFloats);
  SumBlock(query, codes, [&](int head, int part, VI sums) HWY_ATTR {
    shares[part] = hn::Add(shares[part], ChordShares(query, head, sums));
  });
  uint32_t reaching = 0;
  for (int part = 0; part < kParts; ++part) {
    const auto enough = hn::Ge(shares[part], hn::Set(kFloats, kChordSlack * total));
    reaching |= BitsOf(enough) << (part * kLanes);
  }
  return reaching;
}

// A share of the next page's bytes, fetched at a block of this one: pages lie apart, so
// that the hardware does not fetch ahead.
HWY_INLINE void FetchNext(const ScanQuery& query, int block) {
  if (query.next == nullptr) return;
  const int64_t num_blocks = query.sketch.page_tokens / kSketchBlock;
  const int64_t bytes = query.sketch.page_bytes();
  const int64_t share = hwy::RoundUpTo((bytes + num_blocks - 1) / num_blocks, 64);
  const int64_t end = HWY_MIN((block + 1) * share, bytes);
  for (int64_t i = block * share; i < end; i += 64) {
    __builtin_prefetch(query.next + i, /*rw=*/0, /*locality=*/3);
  }
}

int64_t FindCandidates(const ScanQuery& query, const std::byte* bytes, const uint16_t* positions,
                       Position first, float least, PickCandidate* to) {
  const SketchPage page = WeighPage(query, bytes);
  SetChords(query);
  const float total = least * static_cast<float>(query.num_heads);
  const int64_t block_bytes = int64_t{query.sketch.channels} / 2 * kSketchBlock;
  const VF per_head = hn::Set(kFloats, static_cast<float>(query.num_heads));
  HWY_ALIGN float values[kSketchBlock];
  int64_t count = 0;
  for (int block = 0; block < query.sketch.page_tokens / kSketchBlock; ++block) {
    FetchNext(query, block);
    if (positions[block] == 0) continue;
    uint32_t left = MayReach(query, page.codes + block * block_bytes, total) & positions[block];
    if (left == 0) continue;
    for (int part = 0; part < kParts; ++part) {
      VF sum = hn::Zero(kFloats);
      for (int head = 0; head < query.num_heads; ++head) {
        sum = hn::Add(sum, Shares(query, head, part));
      }
      hn::StoreU(hn::Div(sum, per_head), kFloats, values + part * kLanes);
    }
    for (; left != 0; left &= left - 1) {
      const int i = __builtin_ctz(left);
      if (values[i] >= least) to[count++] = {values[i], first + block * kSketchBlock + i};
    }
  }
  return count;
}

void AddMass(const ScanQuery& query, const std::byte* bytes, const uint16_t* positions,
             double* mass) {
  const SketchPage page = WeighPage(query, bytes);
  const int64_t block_bytes = int64_t{query.sketch.channels} / 2 * kSketchBlock;
  for (int block = 0; block < query.sketch.page_tokens / kSketchBlock; ++block) {
    FetchNext(query, block);
    if (positions[block] == 0) continue;
    SumBlock(query, page.codes + block * block_bytes, [](int, int, VI) HWY_ATTR {});
    for (int part = 0; part < kParts; ++part) {
      uint8_t bits[8] = {};
      std::memcpy(bits, reinterpret_cast<const uint8_t*>(positions + block) + part, 2 - part);
      const auto counts = hn::LoadMaskBits(kFloats, bits);
      for (int head = 0; head < query.num_heads; ++head) {
        const VF shares = hn::IfThenElseZero(counts, Shares(query, head, part));
        mass[head] += hn::GetLane(hn::SumOfLanes(kFloats, shares));
      }
    }
  }
}

}  // namespace

constexpr ScanKernels kScanKernels = {.find_candidates = FindCandidates, .add_mass = AddMass};

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
#if HWY_TARGET == HWY_AVX3_DL
#pragma GCC pop_options
#endif
HWY_AFTER_NAMESPACE();
#endif  // a target with kernels

#if HWY_ONCE
namespace heavywater {

const ScanKernels& ScanKernelsOf(CpuTarget target, bool dot_products) {
  if (target == CpuTarget::kAvx2) return N_AVX2::kScanKernels;
  // Asking the processor takes microseconds.
  static const bool has_them = (hwy::SupportedTargets() & HWY_AVX3_DL) != 0;
  return dot_products && has_them ? N_AVX3_DL::kScanKernels : N_AVX3::kScanKernels;
}

}  // namespace heavywater
#endif  // HWY_ONCE
