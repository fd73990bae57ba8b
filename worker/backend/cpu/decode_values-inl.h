// Decode attention's pass over V. Per-target include guard: see hwy/foreach_target.h.
#if defined(HEAVYWATER_DECODE_VALUES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEAVYWATER_DECODE_VALUES_INL_H_
#undef HEAVYWATER_DECODE_VALUES_INL_H_
#else
#define HEAVYWATER_DECODE_VALUES_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "worker/backend/cpu/decode_chunk-inl.h"
#include "worker/backend/cpu/decode_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {

// Vectors of outputs that stay in registers for a block of rows.
constexpr int kValueVectors = kLanes == 16 ? 4 : 2;

// Slots of a chunk, counted from its first, in the order of visits. What no row sees is
// not among them: it is not read, so that not even an infinity there gets out.
struct Visits {
  int count = 0;
  uint8_t slots[kChunk];
};

HWY_INLINE constexpr Visits AllVisits() {
  Visits visits{.count = kChunk, .slots = {}};
  for (int i = 0; i < kChunk; ++i) visits.slots[i] = static_cast<uint8_t>(VisitedAt(i));
  return visits;
}
constexpr Visits kAllVisits = AllVisits();

HWY_INLINE const Visits& VisitsOf(const SlotBlock& block, int first, Position last,
                                  Visits& workspace) {
  if (AllVisible(block, first, last)) return kAllVisits;
  const Position* positions = block.positions + first;
  const int count = HWY_MIN(block.count - first, kChunk);
  workspace.count = 0;
  for (int i = 0; i < kChunk; ++i) {
    const int slot = VisitedAt(i);
    if (slot >= count || positions[slot] < 0 || positions[slot] > last) continue;
    workspace.slots[workspace.count++] = static_cast<uint8_t>(slot);
  }
  return workspace;
}

// A row's vectors are taken in passes over the chunk; those that share a line divide its
// fetches. A single vector fetches nothing.
template <int kVectors, typename T>
inline constexpr int kPassesOfLine = kVectors == 1 ? 1
                                                   : HWY_MAX(64 / int{sizeof(T)} / (2 * kLanes), 1);

// out[r][0 .. kVectors * kLanes) += sum over slots of weights[r][slot] * value; several
// vectors in LoadKvPair()'s order. `ahead`: what is fetched meanwhile; kPass: which pass over
// its lines this is.
template <int kRows, int kVectors, bool kHalf, int kPass, typename T>
HWY_NOINLINE void AddValues(const T* values, int64_t value_stride, const Ahead& ahead,
                            const Visits& visits, const float* weights, int64_t weights_stride,
                            float* out, int64_t out_stride) {
  VF acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      acc[r][c] = hn::LoadU(kFloats, out + r * out_stride + c * kLanes);
    }
  }
  const int64_t row_bytes = value_stride * int64_t{sizeof(T)};
  const auto add = [&](int row, ptrdiff_t near, ptrdiff_t far, const T* from,
                       const float* of_slot) HWY_ATTR {
    VF value[kVectors];
    if constexpr (kVectors % 2 == 0) {
      for (int c = 0; c < kVectors; c += 2) {
        FetchAhead<2 * kLanes>(from + c * kLanes, kPass * 2 * kLanes, row, near, far);
        LoadKvPair(kFloats, from + c * kLanes, value[c], value[c + 1]);
      }
    } else {
      static_assert(kVectors == 1);
      value[0] = kHalf ? LoadKvHalf(kFloats, from) : LoadKv(kFloats, from);
    }
    for (int r = 0; r < kRows; ++r) {
      const VF weight = hn::Set(kFloats, of_slot[r * weights_stride]);
      for (int c = 0; c < kVectors; ++c) acc[r][c] = hn::MulAdd(weight, value[c], acc[r][c]);
    }
  };
  if (visits.count == kChunk) {
    for (int first = 0; first < kRun; first += kQuarter) {
      const ptrdiff_t near = NearOf(ahead, first, row_bytes);
      ptrdiff_t far[2][kRuns];  // of rows of even and of odd index
      for (int run = 0; run < kRuns; ++run) {
        for (int odd = 0; odd < 2; ++odd)
          far[odd][run] = AheadOf(ahead, run, first + odd, row_bytes);
      }
      for (int row = first; row < first + kQuarter; ++row) {
        const T* from = values + row * value_stride;
        const float* of_slot = weights + row;
        // Unrolled, the compiler keeps sums in memory.
#pragma GCC unroll 1
        for (int run = 0; run < kRuns; ++run) {
          add(row, near, far[row % 2][run], from, of_slot);
          from += kRun * value_stride;
          of_slot += kRun;
        }
      }
    }
  } else {
    for (int i = 0; i < visits.count; ++i) {
      const int row = i / kRuns;
      add(row, NearOf(ahead, row, row_bytes), AheadOf(ahead, i % kRuns, row, row_bytes),
          values + visits.slots[i] * value_stride, weights + visits.slots[i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      hn::StoreU(acc[r][c], kFloats, out + r * out_stride + c * kLanes);
    }
  }
}

// The chunk's visible slots, for all rows and columns: it stays in L1 meanwhile.
template <typename T>
void AddChunk(const SlotBlock& block, const Ahead& ahead, int first, const Visits& visits,
              int num_rows, BlockResult& result) {
  const int64_t stride = block.head_dim;
  const int64_t out_stride = PaddedRow(stride);
  const T* values = static_cast<const T*>(block.values) + first * stride;
  const int whole = block.head_dim / kLanes;
  ForBlocks<kRowBlock>(num_rows, [&](auto rows, int first_row) HWY_ATTR {
    const float* weights = result.weights + first_row * result.weights_stride + first;
    float* out = result.out + first_row * out_stride;
    const auto add = [&](auto vectors, auto half, int column) HWY_ATTR {
      constexpr int kPasses = kPassesOfLine<vectors(), T>;
      const auto in_pass = [&](auto pass) HWY_ATTR {
        AddValues<rows(), vectors(), half(), pass()>(values + column * kLanes, stride, ahead,
                                                     visits, weights, result.weights_stride,
                                                     out + column * kLanes, out_stride);
      };
      static_assert(kPasses <= 2);
      if (kPasses == 1 || column / vectors() % kPasses == 0) {
        return in_pass(std::integral_constant<int, 0>());
      }
      in_pass(std::integral_constant<int, kPasses - 1>());
    };
    int column = 0;
    for (; column + kValueVectors <= whole; column += kValueVectors) {
      add(std::integral_constant<int, kValueVectors>(), std::false_type(), column);
    }
    for (; column + 2 <= whole; column += 2) {
      add(std::integral_constant<int, 2>(), std::false_type(), column);
    }
    if (column < whole) add(std::integral_constant<int, 1>(), std::false_type(), column);
    if (kLanes == 16 && whole * kLanes < block.head_dim) {
      add(std::integral_constant<int, 1>(), std::true_type(), whole);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
