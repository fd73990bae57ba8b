#include "worker/backend/cpu/decode_kernels.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/backend/cpu/decode_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must come after foreach_target.h.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

// Highway insists on compiling the compiler's baseline too; it has no kernels.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
#include "worker/backend/cpu/fixed_point-inl.h"
#include "worker/backend/cpu/kv_load-inl.h"
HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace {

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
constexpr DF kFloats;
constexpr int kLanes = hn::MaxLanes(DF());
// Rows whose accumulators (4 each) and operands fit the registers: 32 of them
// on AVX-512, 16 on AVX2.
constexpr int kRowBlock = kLanes == 16 ? 4 : 2;
constexpr int kSlotsAtOnce = 4;
// Values of this many slots stay in L1 while every row and column visits them.
constexpr int kValueBlock = 64;
// How far ahead of the arithmetic rows of K and of V are fetched, into L2: the
// hardware's own prefetching stops at each 4 KiB page, and L1 is full of the rows
// at hand.
constexpr int kPrefetchRows = 64;

HWY_INLINE void PrefetchToL2(const void* address) {
  __builtin_prefetch(address, /*rw=*/0, /*locality=*/2);
}

// Lane j of each 128-bit block is the sum of v[j]'s four lanes in that block.
HWY_INLINE VF SumWithinBlocks(const VF (&v)[kSlotsAtOnce]) {
  const hn::Repartition<double, DF> pairs;
  const VF ab =
      hn::Add(hn::InterleaveLower(kFloats, v[0], v[1]), hn::InterleaveUpper(kFloats, v[0], v[1]));
  const VF cd =
      hn::Add(hn::InterleaveLower(kFloats, v[2], v[3]), hn::InterleaveUpper(kFloats, v[2], v[3]));
  const auto ab2 = hn::BitCast(pairs, ab);
  const auto cd2 = hn::BitCast(pairs, cd);
  return hn::Add(hn::BitCast(kFloats, hn::InterleaveLower(pairs, ab2, cd2)),
                 hn::BitCast(kFloats, hn::InterleaveUpper(pairs, ab2, cd2)));
}

// parts[k] has SumWithinBlocks of slots 4k .. 4k + 3: adds the blocks of each,
// lane i becomes slot i.
HWY_INLINE VF SumAcrossBlocks(const VF (&parts)[kLanes / kSlotsAtOnce]) {
  const auto halves = [](VF hi, VF lo) HWY_ATTR {
    return hn::Add(hn::ConcatLowerLower(kFloats, hi, lo), hn::ConcatUpperUpper(kFloats, hi, lo));
  };
#if HWY_TARGET == HWY_AVX2
  return halves(parts[1], parts[0]);
#else
  const VF x = halves(parts[2], parts[0]);
  const VF y = halves(parts[3], parts[1]);
  return hn::Add(hn::OddEvenBlocks(y, x), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(x, y)));
#endif
}

// Calls body(offset) for the channels that LoadKvPair() takes apart.
template <class Body>
HWY_INLINE void ForSplitPairs(int num_rows, int head_dim, const Body& body) {
  for (int r = 0; r < num_rows; ++r) {
    for (int i = 0; i + 2 * kLanes <= head_dim; i += 2 * kLanes) {
      body(r * PaddedRow(head_dim) + i);
    }
  }
}

// Queries in the order in which keys are loaded.
void SplitPairs(const float* queries, int num_rows, int head_dim, float* to) {
  std::copy_n(queries, num_rows * PaddedRow(head_dim), to);
  ForSplitPairs(num_rows, head_dim, [&](int64_t at) HWY_ATTR {
    VF even;
    VF odd;
    hn::LoadInterleaved2(kFloats, queries + at, even, odd);
    hn::StoreU(even, kFloats, to + at);
    hn::StoreU(odd, kFloats, to + at + kLanes);
  });
}

// Outputs in the order of the channels again.
void JoinPairs(int num_rows, int head_dim, float* out) {
  ForSplitPairs(num_rows, head_dim, [&](int64_t at) HWY_ATTR {
    const VF even = hn::LoadU(kFloats, out + at);
    const VF odd = hn::LoadU(kFloats, out + at + kLanes);
    hn::StoreInterleaved2(even, odd, kFloats, out + at);
  });
}

// sums[r] = SumWithinBlocks of row r's products with four keys.
template <int kRows, typename T>
HWY_INLINE void DotFourKeys(const T* const (&keys)[kSlotsAtOnce], const float* queries,
                            int64_t stride, int head_dim, VF (&sums)[kRows]) {
  VF acc[kRows][kSlotsAtOnce];
  for (auto& row : acc) {
    for (VF& sum : row) sum = hn::Zero(kFloats);
  }
  const auto multiply = [&](int i, const VF(&key)[kSlotsAtOnce]) HWY_ATTR {
    for (int r = 0; r < kRows; ++r) {
      const VF query = hn::LoadU(kFloats, queries + r * stride + i);
      for (int k = 0; k < kSlotsAtOnce; ++k) acc[r][k] = hn::MulAdd(query, key[k], acc[r][k]);
    }
  };
  int i = 0;
  for (; i + 2 * kLanes <= head_dim; i += 2 * kLanes) {
    VF first[kSlotsAtOnce];
    VF second[kSlotsAtOnce];
    for (int k = 0; k < kSlotsAtOnce; ++k) {
      PrefetchToL2(keys[k] + kPrefetchRows * head_dim + i);
      LoadKvPair(kFloats, keys[k] + i, first[k], second[k]);
    }
    multiply(i, first);
    multiply(i + kLanes, second);
  }
  if (i + kLanes <= head_dim) {
    multiply(i, {LoadKv(kFloats, keys[0] + i), LoadKv(kFloats, keys[1] + i),
                 LoadKv(kFloats, keys[2] + i), LoadKv(kFloats, keys[3] + i)});
    i += kLanes;
  }
  if (kLanes == 16 && i < head_dim) {
    multiply(i, {LoadKvHalf(kFloats, keys[0] + i), LoadKvHalf(kFloats, keys[1] + i),
                 LoadKvHalf(kFloats, keys[2] + i), LoadKvHalf(kFloats, keys[3] + i)});
  }
  for (int r = 0; r < kRows; ++r) sums[r] = SumWithinBlocks(acc[r]);
}

// Logits of kRows rows and kLanes slots from `slot`, -infinity where masked.
template <int kRows, typename T>
HWY_INLINE void Logits(const SlotBlock& block, const QueryRows& rows, int first_row, int slot,
                       BlockResult& result, VF* maximum) {
  const int64_t stride = PaddedRow(block.head_dim);
  VF parts[kRows][kLanes / kSlotsAtOnce];
  for (int part = 0; part < kLanes / kSlotsAtOnce; ++part) {
    const T* keys[kSlotsAtOnce];
    for (int k = 0; k < kSlotsAtOnce; ++k) {
      // Past the end: any row that exists; masked below.
      const int index = HWY_MIN(slot + part * kSlotsAtOnce + k, block.count - 1);
      keys[k] = static_cast<const T*>(block.keys) + int64_t{index} * block.head_dim;
    }
    VF sums[kRows];
    DotFourKeys<kRows, T>(keys, rows.queries + first_row * stride, stride, block.head_dim, sums);
    for (int r = 0; r < kRows; ++r) parts[r][part] = sums[r];
  }
  const hn::RebindToSigned<DF> ints;
  const auto inside = hn::FirstN(ints, static_cast<size_t>(HWY_MIN(block.count - slot, kLanes)));
  const auto positions = hn::MaskedLoad(inside, ints, block.positions + slot);
  const auto used = hn::And(inside, hn::Gt(positions, hn::Set(ints, kNoPosition)));
  for (int r = 0; r < kRows; ++r) {
    const auto query_position = hn::Set(ints, rows.positions[first_row + r]);
    const auto visible =
        hn::RebindMask(kFloats, hn::AndNot(hn::Gt(positions, query_position), used));
    const VF logit = hn::IfThenElse(visible, SumAcrossBlocks(parts[r]),
                                    hn::Set(kFloats, -std::numeric_limits<float>::infinity()));
    hn::StoreU(logit, kFloats, result.weights + (first_row + r) * result.weights_stride + slot);
    maximum[first_row + r] = hn::Max(maximum[first_row + r], logit);
  }
}

// Calls body(integral_constant<int, rows>, first_row) over blocks of rows.
template <int kMaxBlock, class Body>
HWY_INLINE void ForBlocks(int count, const Body& body) {
  int first = 0;
  for (; first + kMaxBlock <= count; first += kMaxBlock) {
    body(std::integral_constant<int, kMaxBlock>(), first);
  }
  if constexpr (kMaxBlock > 3) {
    if (count - first == 3) return body(std::integral_constant<int, 3>(), first);
  }
  if constexpr (kMaxBlock > 2) {
    if (count - first == 2) return body(std::integral_constant<int, 2>(), first);
  }
  if (count - first == 1) body(std::integral_constant<int, 1>(), first);
}

// The same over an even count, in blocks of four or two.
template <class Body>
HWY_INLINE void ForPairs(int count, const Body& body) {
  int first = 0;
  for (; first + 4 <= count; first += 4) body(std::integral_constant<int, 4>(), first);
  if (first < count) body(std::integral_constant<int, 2>(), first);
}

// Logits to weights in place; their maximum is known. Sums in double: the
// probabilities of a query add up to one within their own rounding.
double ExpAndSum(float maximum, int count, float* weights) {
  const hn::Repartition<double, DF> doubles;
  const hn::Half<DF> half;
  const VF shift = hn::Set(kFloats, maximum);
  auto lower = hn::Zero(doubles);
  auto upper = hn::Zero(doubles);
  for (int slot = 0; slot < count; slot += kLanes) {
    // A row without any visible slot has NaN here, and Exp() of that is 0.
    const VF weight = hn::Exp(kFloats, hn::Sub(hn::LoadU(kFloats, weights + slot), shift));
    hn::StoreU(weight, kFloats, weights + slot);
    lower = hn::Add(lower, hn::PromoteTo(doubles, hn::LowerHalf(half, weight)));
    upper = hn::Add(upper, hn::PromoteTo(doubles, hn::UpperHalf(half, weight)));
  }
  return hn::GetLane(hn::SumOfLanes(doubles, hn::Add(lower, upper)));
}

// out[r][0 .. kVectors * kLanes) += sum over slots of weights[r][slot] * value; an even
// number of vectors in LoadKvPair()'s order.
template <int kRows, int kVectors, bool kHalf, typename T>
HWY_INLINE void AddValues(const T* values, int64_t value_stride, const float* weights,
                          int64_t weights_stride, int count, float* out, int64_t out_stride) {
  VF acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      acc[r][c] = hn::LoadU(kFloats, out + r * out_stride + c * kLanes);
    }
  }
  for (int slot = 0; slot < count; ++slot, values += value_stride) {
    VF value[kVectors];
    if constexpr (kVectors % 2 == 0) {
      for (int c = 0; c < kVectors; c += 2) {
        PrefetchToL2(values + kPrefetchRows * value_stride + c * kLanes);
        LoadKvPair(kFloats, values + c * kLanes, value[c], value[c + 1]);
      }
    } else {
      static_assert(kVectors == 1);
      value[0] = kHalf ? LoadKvHalf(kFloats, values) : LoadKv(kFloats, values);
    }
    for (int r = 0; r < kRows; ++r) {
      const VF weight = hn::Set(kFloats, weights[r * weights_stride + slot]);
      for (int c = 0; c < kVectors; ++c) acc[r][c] = hn::MulAdd(weight, value[c], acc[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      hn::StoreU(acc[r][c], kFloats, out + r * out_stride + c * kLanes);
    }
  }
}

template <typename T>
void AddValuesOfRun(const SlotBlock& block, int first, int count, int num_rows,
                    BlockResult& result) {
  const int64_t out_stride = PaddedRow(block.head_dim);
  const T* values = static_cast<const T*>(block.values) + int64_t{first} * block.head_dim;
  const int whole = block.head_dim / kLanes;
  const int paired = whole / 2 * 2;
  ForBlocks<kRowBlock>(num_rows, [&](auto rows, int first_row) HWY_ATTR {
    const float* weights = result.weights + first_row * result.weights_stride + first;
    float* out = result.out + first_row * out_stride;
    ForPairs(paired, [&](auto vectors, int column) HWY_ATTR {
      AddValues<rows(), vectors(), false>(values + column * kLanes, block.head_dim, weights,
                                          result.weights_stride, count, out + column * kLanes,
                                          out_stride);
    });
    if (paired < whole) {
      AddValues<rows(), 1, false>(values + paired * kLanes, block.head_dim, weights,
                                  result.weights_stride, count, out + paired * kLanes, out_stride);
    }
    if (kLanes == 16 && whole * kLanes < block.head_dim) {
      AddValues<rows(), 1, true>(values + whole * kLanes, block.head_dim, weights,
                                 result.weights_stride, count, out + whole * kLanes, out_stride);
    }
  });
}

// Runs of slots that some row sees; what lies in the others is not read, so that
// not even an infinity there gets out.
template <typename T>
void AddVisibleValues(const SlotBlock& block, const QueryRows& rows, BlockResult& result) {
  Position last = rows.positions[0];
  for (int r = 1; r < rows.num_rows; ++r) last = HWY_MAX(last, rows.positions[r]);
  const auto visible = [&](int slot) {
    return block.positions[slot] >= 0 && block.positions[slot] <= last;
  };
  int first = 0;
  while (first < block.count) {
    int end = first;
    while (end < block.count && end - first < kValueBlock && visible(end)) ++end;
    if (end > first) AddValuesOfRun<T>(block, first, end - first, rows.num_rows, result);
    first = end;
    while (first < block.count && !visible(first)) ++first;
  }
}

template <typename T>
void AttendBlockOf(const SlotBlock& block, const QueryRows& rows, BlockResult& result) {
  VF maximum[kMaxQueryRows];
  for (VF& row : maximum) row = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  for (int slot = 0; slot < block.count; slot += kLanes) {
    ForBlocks<kRowBlock>(rows.num_rows, [&](auto num_rows, int first_row) HWY_ATTR {
      Logits<num_rows(), T>(block, rows, first_row, slot, result, maximum);
    });
  }
  const int padded = static_cast<int>(hwy::RoundUpTo(block.count, kLanes));
  for (int r = 0; r < rows.num_rows; ++r) {
    float* weights = result.weights + r * result.weights_stride;
    result.maximum[r] = hn::GetLane(hn::MaxOfLanes(kFloats, maximum[r]));
    result.sum[r] = ExpAndSum(result.maximum[r], padded, weights);
    float* out = result.out + r * PaddedRow(block.head_dim);
    for (int i = 0; i < PaddedRow(block.head_dim); i += kLanes) {
      hn::StoreU(hn::Zero(kFloats), kFloats, out + i);
    }
  }
  AddVisibleValues<T>(block, rows, result);
}

void AttendBlock(const SlotBlock& block, const QueryRows& rows, BlockResult& result) {
  WithKvElement(block.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (!kSplitsPairs<T>) return AttendBlockOf<T>(block, rows, result);
    HWY_ALIGN float queries[kMaxQueryRows * kMaxKvHeadDim];
    SplitPairs(rows.queries, rows.num_rows, block.head_dim, queries);
    QueryRows split = rows;
    split.queries = queries;
    AttendBlockOf<T>(block, split, result);
    JoinPairs(rows.num_rows, block.head_dim, result.out);
  });
}

void AddGains(const float* weights, int64_t weights_stride, const double* factors, int num_rows,
              int64_t count, int64_t* gains) {
  AddFixedPointGains(weights, weights_stride, factors, num_rows, count, gains);
}

}  // namespace

constexpr DecodeKernels kDecodeKernels = {.attend_block = AttendBlock, .add_gains = AddGains};

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();
#endif  // a target with kernels

#if HWY_ONCE
namespace heavywater {

const DecodeKernels& DecodeKernelsOf(CpuTarget target) {
  return target == CpuTarget::kAvx2 ? N_AVX2::kDecodeKernels : N_AVX3::kDecodeKernels;
}

}  // namespace heavywater
#endif  // HWY_ONCE
