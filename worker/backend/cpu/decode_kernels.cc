#include "worker/backend/cpu/decode_kernels.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/backend/cpu/decode_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must come after foreach_target.h.
#include "hwy/highway.h"

// Highway insists on compiling the compiler's baseline too; it has no kernels.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
#include "worker/backend/cpu/decode_logits-inl.h"
#include "worker/backend/cpu/decode_values-inl.h"
#include "worker/backend/cpu/exp-inl.h"
#include "worker/backend/cpu/fixed_point-inl.h"
#include "worker/backend/cpu/kv_load-inl.h"
HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace {

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

// A chunk that is fetched line by line, as the passes would, while there is nothing but
// arithmetic to do.
class Fetches {
 public:
  // `rows`: of a chunk; null: nothing is fetched.
  Fetches(const std::byte* rows, const Ahead& ahead, int64_t row_bytes)
      : rows_(rows), ahead_(ahead), row_bytes_(row_bytes), visit_(rows == nullptr ? kChunk : 0) {}
  HWY_INLINE void Next(int lines) {
    for (; lines > 0 && visit_ < kChunk; --lines) {
      if (offset_ == 0) {
        at_ = rows_ + VisitedAt(visit_) * row_bytes_ +
              AheadOf(ahead_, visit_ % kRuns, visit_ / kRuns, row_bytes_);
      }
      PrefetchToL2(at_ + offset_);
      offset_ += kLine;
      if (offset_ < row_bytes_) continue;
      offset_ = 0;
      ++visit_;
    }
  }

 private:
  static constexpr int kLine = 64;
  const std::byte* rows_;
  const Ahead ahead_;
  const int64_t row_bytes_;
  int visit_;
  int64_t offset_ = 0;
  const std::byte* at_ = nullptr;
};

// Logits to weights in place; their maximum is known. A few are summed as floats, these
// sums in double: the probabilities of a query add up to one within their own rounding.
double ExpAndSum(float maximum, int count, float* weights, Fetches& fetches) {
  const hn::Repartition<double, DF> doubles;
  const hn::Half<DF> half;
  constexpr int kSummed = 4 * kLanes;
  const VF shift = hn::Set(kFloats, maximum);
  auto lower = hn::Zero(doubles);
  auto upper = hn::Zero(doubles);
  for (int first = 0; first < count; first += kSummed) {
    VF sum = hn::Zero(kFloats);
    for (int slot = first; slot < HWY_MIN(first + kSummed, count); slot += kLanes) {
      // A row without any visible slot has NaN here: 0.
      const VF weight = ExpOfLogit(kFloats, hn::Sub(hn::LoadU(kFloats, weights + slot), shift));
      hn::StoreU(weight, kFloats, weights + slot);
      sum = hn::Add(sum, weight);
      fetches.Next(kLanes / 8);
    }
    lower = hn::Add(lower, hn::PromoteTo(doubles, hn::LowerHalf(half, sum)));
    upper = hn::Add(upper, hn::PromoteTo(doubles, hn::UpperHalf(half, sum)));
  }
  return hn::GetLane(hn::SumOfLanes(doubles, hn::Add(lower, upper)));
}

// What the pass over a block fetches ahead of each of its chunks. While weights are
// computed there is time for one more chunk of V than the passes have; so the last two turns
// share what one fetches, and memory is idle in neither.
template <typename T>
class Schedule {
 public:
  explicit Schedule(const SlotBlock& block)
      : block_(block),
        chunk_(int64_t{kChunk} * block.head_dim),
        num_chunks_((block.count + kChunk - 1) / kChunk) {}

  int num_chunks() const { return num_chunks_; }
  // What is fetched during the chunk's turn.
  Ahead AfterKeys(int chunk) const { return From(chunk, chunk + 1); }
  Ahead AfterValues(int chunk) const {
    const int place = num_chunks_ + chunk;
    const bool last = chunk + 1 == num_chunks_;
    Ahead ahead = From(place, last ? place + 1 : place + 2);
    if (num_chunks_ > 1 && last) ahead.rows = FetchedRows::kOdd;
    if (chunk + 2 == num_chunks_) ahead.rows = FetchedRows::kEven;
    return ahead;
  }
  Fetches WhileWeighing() const {
    const int place = num_chunks_ - 1;
    return {num_chunks_ > 1 ? Chunk(place) : nullptr, From(place, place + 2),
            block_.head_dim * int64_t{sizeof(T)}};
  }

 private:
  // In the order of turns: those of K, those of V, two of the next block's K. Null: none.
  const std::byte* Chunk(int place) const {
    const int64_t bytes = chunk_ * int64_t{sizeof(T)};
    if (place < num_chunks_) return static_cast<const std::byte*>(block_.keys) + place * bytes;
    place -= num_chunks_;
    if (place < num_chunks_) return static_cast<const std::byte*>(block_.values) + place * bytes;
    place -= num_chunks_;
    if (block_.next_keys == nullptr || place >= 2) return nullptr;
    return static_cast<const std::byte*>(block_.next_keys) + place * bytes;
  }
  ptrdiff_t Distance(int from, int to) const {
    return Chunk(to) == nullptr ? 0 : Chunk(to) - Chunk(from);
  }
  Ahead From(int place, int next) const {
    return {.follows = Distance(place, place + 1),
            .next = Distance(place, next),
            .after = Distance(place, next + 1)};
  }
  const SlotBlock& block_;
  const int64_t chunk_;
  const int num_chunks_;
};

template <typename T>
void AttendBlockOf(const SlotBlock& block, const QueryRows& rows, BlockResult& result) {
  const Schedule<T> schedule(block);
  VF maximum[kMaxQueryRows];
  for (VF& row : maximum) row = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  FetchRow(result.out, rows.num_rows * PaddedRow(block.head_dim));
  const auto [first_seeing, last_seeing] =
      std::minmax_element(rows.positions, rows.positions + rows.num_rows);
  for (int chunk = 0; chunk < schedule.num_chunks(); ++chunk) {
    const bool masked = !AllVisible(block, chunk * kChunk, *first_seeing);
    ForBlocks<kRowBlock>(rows.num_rows, [&](auto num_rows, int first_row) HWY_ATTR {
      ChunkLogits<num_rows(), T>(block, schedule.AfterKeys(chunk), masked, rows, first_row,
                                 chunk * kChunk, result, maximum);
    });
  }
  const int padded = static_cast<int>(hwy::RoundUpTo(block.count, kLanes));
  Fetches fetches = schedule.WhileWeighing();
  for (int r = 0; r < rows.num_rows; ++r) {
    float* weights = result.weights + r * result.weights_stride;
    result.maximum[r] = hn::GetLane(hn::MaxOfLanes(kFloats, maximum[r]));
    result.sum[r] = ExpAndSum(result.maximum[r], padded, weights, fetches);
    float* out = result.out + r * PaddedRow(block.head_dim);
    for (int i = 0; i < PaddedRow(block.head_dim); i += kLanes) {
      hn::StoreU(hn::Zero(kFloats), kFloats, out + i);
    }
  }
  Visits workspace;
  for (int chunk = 0; chunk < schedule.num_chunks(); ++chunk) {
    const Visits& visits = VisitsOf(block, chunk * kChunk, *last_seeing, workspace);
    AddChunk<T>(block, schedule.AfterValues(chunk), chunk * kChunk, visits, rows.num_rows, result);
  }
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

void AddScaled(const float* from, double factor, int64_t count, double* sums) {
  const hn::ScalableTag<double> doubles;
  const hn::Rebind<float, decltype(doubles)> floats;
  const auto scale = hn::Set(doubles, factor);
  for (int64_t i = 0; i < count; i += hn::MaxLanes(doubles)) {
    const auto value = hn::PromoteTo(doubles, hn::LoadU(floats, from + i));
    hn::StoreU(hn::MulAdd(scale, value, hn::LoadU(doubles, sums + i)), doubles, sums + i);
  }
}

void AddGains(const float* weights, int64_t weights_stride, const double* factors, int num_rows,
              int64_t count, int64_t* gains) {
  AddFixedPointGains(weights, weights_stride, factors, num_rows, count, gains);
}

}  // namespace

constexpr DecodeKernels kDecodeKernels = {
    .attend_block = AttendBlock, .add_scaled = AddScaled, .add_gains = AddGains};

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
