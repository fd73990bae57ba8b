// Decode attention's pass over K. Per-target include guard: see hwy/foreach_target.h.
#if defined(HEAVYWATER_DECODE_LOGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEAVYWATER_DECODE_LOGITS_INL_H_
#undef HEAVYWATER_DECODE_LOGITS_INL_H_
#else
#define HEAVYWATER_DECODE_LOGITS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "worker/backend/cpu/decode_chunk-inl.h"
#include "worker/backend/cpu/decode_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {

// Keys whose sums are reduced together, and those whose accumulators for a block of
// rows fit the registers: 32 of them on AVX-512, 16 on AVX2.
constexpr int kKeysAtOnce = 4;
constexpr int kKeysInRegisters = kLanes == 16 ? 4 : 2;

// Lane j of each 128-bit block is the sum of v[j]'s four lanes in that block.
HWY_INLINE VF SumWithinBlocks(const VF (&v)[kKeysAtOnce]) {
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

// parts[p] has SumWithinBlocks of four keys: adds the blocks of each, lane 4 p + j
// becomes its key j.
HWY_INLINE VF SumAcrossBlocks(const VF (&parts)[kLanes / kKeysAtOnce]) {
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

// acc[r][k] = lanes whose sum is row r's product with key k. Of each key, the lines at
// `near` and `ahead[k]` bytes from what is read are fetched (FetchAhead()).
template <int kRows, int kKeys, typename T>
HWY_INLINE void Multiply(const T* const* keys, ptrdiff_t near, const ptrdiff_t* ahead,
                         const float* queries, int64_t stride, int head_dim,
                         VF (&acc)[kRows][kKeys]) {
  for (auto& row : acc) {
    for (VF& sum : row) sum = hn::Zero(kFloats);
  }
  const auto add = [&](int i, const VF(&key)[kKeys]) HWY_ATTR {
    for (int r = 0; r < kRows; ++r) {
      const VF query = hn::LoadU(kFloats, queries + r * stride + i);
      for (int k = 0; k < kKeys; ++k) acc[r][k] = hn::MulAdd(query, key[k], acc[r][k]);
    }
  };
  VF first[kKeys];
  VF second[kKeys];
  int i = 0;
  for (; i + 2 * kLanes <= head_dim; i += 2 * kLanes) {
    for (int k = 0; k < kKeys; ++k) {
      FetchAhead<2 * kLanes>(keys[k] + i, i, k, near, ahead[k]);
      LoadKvPair(kFloats, keys[k] + i, first[k], second[k]);
    }
    add(i, first);
    add(i + kLanes, second);
  }
  if (i + kLanes <= head_dim) {
    for (int k = 0; k < kKeys; ++k) first[k] = LoadKv(kFloats, keys[k] + i);
    add(i, first);
    i += kLanes;
  }
  if (kLanes == 16 && i < head_dim) {
    for (int k = 0; k < kKeys; ++k) first[k] = LoadKvHalf(kFloats, keys[k] + i);
    add(i, first);
  }
}

// sums[r] = SumWithinBlocks of row r's products with four keys.
template <int kRows, typename T>
HWY_INLINE void DotFourKeys(const T* const (&keys)[kKeysAtOnce], ptrdiff_t near,
                            const ptrdiff_t (&ahead)[kKeysAtOnce], const float* queries,
                            int64_t stride, int head_dim, VF (&sums)[kRows]) {
  VF all[kRows][kKeysAtOnce];
  for (int first = 0; first < kKeysAtOnce; first += kKeysInRegisters) {
    VF acc[kRows][kKeysInRegisters];
    Multiply<kRows, kKeysInRegisters, T>(keys + first, near, ahead + first, queries, stride,
                                         head_dim, acc);
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < kKeysInRegisters; ++k) all[r][first + k] = acc[r][k];
    }
  }
  for (int r = 0; r < kRows; ++r) sums[r] = SumWithinBlocks(all[r]);
}

// Of four keys each, to a vector of sums.
constexpr int kParts = kLanes / kKeysAtOnce;

// sums[r][i]: row r's product with slot `first` + i of a whole chunk, in the order of visits.
template <int kRows, typename T>
HWY_INLINE void WholeChunkSums(const SlotBlock& block, const Ahead& ahead, const float* queries,
                               int first, float (&sums)[kRows][kChunk]) {
  const int64_t row_stride = block.head_dim;
  const int64_t row_bytes = row_stride * int64_t{sizeof(T)};
  const T* row = static_cast<const T*>(block.keys) + first * row_stride;
  static_assert(kKeysAtOnce == kRuns);  // one of each run at once
  static_assert(kQuarter % kParts == 0);
  for (int quarter = 0; quarter < kRun; quarter += kQuarter) {
    const ptrdiff_t near = NearOf(ahead, quarter, row_bytes);
    ptrdiff_t far[kRuns];
    for (int run = 0; run < kRuns; ++run) far[run] = AheadOf(ahead, run, quarter, row_bytes);
    for (int at = quarter; at < quarter + kQuarter; at += kParts) {
      VF parts[kRows][kParts];
      for (int part = 0; part < kParts; ++part, row += row_stride) {
        const T* const keys[kKeysAtOnce] = {
            row, row + kRun * row_stride, row + 2 * kRun * row_stride, row + 3 * kRun * row_stride};
        VF of_keys[kRows];
        DotFourKeys<kRows, T>(keys, near, far, queries, PaddedRow(block.head_dim), block.head_dim,
                              of_keys);
        for (int r = 0; r < kRows; ++r) parts[r][part] = of_keys[r];
      }
      for (int r = 0; r < kRows; ++r) {
        hn::Store(SumAcrossBlocks(parts[r]), kFloats, sums[r] + at * kRuns);
      }
    }
  }
}

// Visits to slots as they lie.
template <int kRows>
HWY_INLINE void SlotsOfVisits(float (&sums)[kRows][kChunk]) {
  static_assert(kRuns == 4);
  for (auto& row : sums) {
    VF runs[kRun / kLanes][kRuns];
    for (int i = 0; i < kRun / kLanes; ++i) {
      hn::LoadInterleaved4(kFloats, row + i * kRuns * kLanes, runs[i][0], runs[i][1], runs[i][2],
                           runs[i][3]);
    }
    for (int i = 0; i < kRun / kLanes; ++i) {
      for (int run = 0; run < kRuns; ++run) {
        hn::Store(runs[i][run], kFloats, row + run * kRun + i * kLanes);
      }
    }
  }
}

// As WholeChunkSums() of a chunk that ends early; the slots as they lie.
template <int kRows, typename T>
HWY_INLINE void PartialChunkSums(const SlotBlock& block, const Ahead& ahead, const float* queries,
                                 int first, float (&sums)[kRows][kChunk]) {
  const int64_t row_bytes = block.head_dim * int64_t{sizeof(T)};
  const int end = block.count - first;
  for (int visit = 0; visit < end; visit += kLanes) {
    VF parts[kRows][kParts];
    for (int part = 0; part < kParts; ++part) {
      const int row = visit / kRuns + part;
      const T* keys[kKeysAtOnce];
      ptrdiff_t far[kKeysAtOnce];
      for (int k = 0; k < kKeysAtOnce; ++k) {
        far[k] = AheadOf(ahead, k, row, row_bytes);
        // Past the end: any row that exists; masked later.
        const int slot = HWY_MIN(visit + part * kKeysAtOnce + k, end - 1);
        keys[k] = static_cast<const T*>(block.keys) + int64_t{first + slot} * block.head_dim;
      }
      VF of_keys[kRows];
      DotFourKeys<kRows, T>(keys, NearOf(ahead, row, row_bytes), far, queries,
                            PaddedRow(block.head_dim), block.head_dim, of_keys);
      for (int r = 0; r < kRows; ++r) parts[r][part] = of_keys[r];
    }
    for (int r = 0; r < kRows; ++r) {
      hn::Store(SumAcrossBlocks(parts[r]), kFloats, sums[r] + visit);
    }
  }
}

// sums[r][i]: row r's product with slot `first` + i.
template <int kRows, typename T>
HWY_NOINLINE void ChunkSums(const SlotBlock& block, const Ahead& ahead, const float* queries,
                            int first, float (&sums)[kRows][kChunk]) {
  if (first + kChunk > block.count) {
    return PartialChunkSums<kRows, T>(block, ahead, queries, first, sums);
  }
  WholeChunkSums<kRows, T>(block, ahead, queries, first, sums);
  SlotsOfVisits(sums);
}

// -infinity to the sums of slots that a row does not see.
template <int kRows>
HWY_NOINLINE void MaskSums(const SlotBlock& block, const QueryRows& rows, int first_row, int first,
                           float (&sums)[kRows][kChunk]) {
  const hn::RebindToSigned<DF> ints;
  const VF nothing = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  for (int i = 0; i < kChunk && first + i < block.count; i += kLanes) {
    const int slot = first + i;
    const auto inside = hn::FirstN(ints, static_cast<size_t>(HWY_MIN(block.count - slot, kLanes)));
    const auto positions = hn::MaskedLoad(inside, ints, block.positions + slot);
    const auto used = hn::And(inside, hn::Gt(positions, hn::Set(ints, kNoPosition)));
    for (int r = 0; r < kRows; ++r) {
      const auto query_position = hn::Set(ints, rows.positions[first_row + r]);
      const auto visible =
          hn::RebindMask(kFloats, hn::AndNot(hn::Gt(positions, query_position), used));
      hn::Store(hn::IfThenElse(visible, hn::Load(kFloats, sums[r] + i), nothing), kFloats,
                sums[r] + i);
    }
  }
}

// Logits of kRows rows and a chunk of slots from `first`, -infinity where masked; not
// `masked`: every row sees the whole chunk.
template <int kRows, typename T>
HWY_INLINE void ChunkLogits(const SlotBlock& block, const Ahead& ahead, bool masked,
                            const QueryRows& rows, int first_row, int first, BlockResult& result,
                            VF* maximum) {
  HWY_ALIGN float sums[kRows][kChunk];
  for (int r = 0; r < kRows; ++r) {
    FetchRow(result.weights + (first_row + r) * result.weights_stride + first, kChunk);
  }
  ChunkSums<kRows, T>(block, ahead, rows.queries + first_row * PaddedRow(block.head_dim), first,
                      sums);
  if (masked) MaskSums<kRows>(block, rows, first_row, first, sums);
  const int end = HWY_MIN(block.count - first, kChunk);
  for (int r = 0; r < kRows; ++r) {
    float* to = result.weights + (first_row + r) * result.weights_stride + first;
    for (int i = 0; i < end; i += kLanes) {
      const VF logit = hn::Load(kFloats, sums[r] + i);
      hn::StoreU(logit, kFloats, to + i);
      maximum[first_row + r] = hn::Max(maximum[first_row + r], logit);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
