// What the passes over K and over V share: which rows they visit when, and fetch ahead.
// Per-target include guard: see hwy/foreach_target.h.
#if defined(HEAVYWATER_DECODE_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEAVYWATER_DECODE_CHUNK_INL_H_
#undef HEAVYWATER_DECODE_CHUNK_INL_H_
#else
#define HEAVYWATER_DECODE_CHUNK_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "worker/backend/cpu/decode_kernels.h"
#include "worker/backend/cpu/kv_load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
constexpr DF kFloats;
constexpr int kLanes = hn::MaxLanes(DF());
// Rows that share a key or value in registers.
constexpr int kRowBlock = 4;

// Slots are visited in chunks, and a chunk as kRuns runs of kRun slots, one of each in
// turn: the hardware fetches ahead by stream and stops at each 4 KiB page, so one stream
// leaves memory idle while there is arithmetic. Bits of results depend on this order,
// so it depends on nothing but a slot's index.
constexpr int kRuns = 4;
constexpr int kRun = 16;
constexpr int kChunk = kRuns * kRun;
// Of a run: within it, the same distances ahead hold.
constexpr int kQuarter = kRun / kRuns;
// The slot, counted from the chunk's first, that is visited after `before` others.
HWY_INLINE constexpr int VisitedAt(int before) { return before % kRuns * kRun + before / kRuns; }

// Bytes from a chunk's rows to the same rows of the chunk whose turn follows, of the next one
// to be fetched into L2, and of the one after that. 0: none. Two turns in a row may share the
// fetches of one: each fetches the rows of even or of odd index.
enum class FetchedRows { kAll, kEven, kOdd };
struct Ahead {
  ptrdiff_t follows = 0;
  ptrdiff_t next = 0;
  ptrdiff_t after = 0;
  FetchedRows rows = FetchedRows::kAll;
};

// Bytes from row `row` of run `run` to the row that is fetched at its turn. Runs are fetched
// a quarter of a run apart: each is a 4 KiB page, and were all to begin a page at once,
// memory would wait for the hardware to notice them.
HWY_INLINE ptrdiff_t AheadOf(const Ahead& ahead, int run, int row, int64_t row_bytes) {
  if (ahead.rows == (row % 2 == 0 ? FetchedRows::kOdd : FetchedRows::kEven)) return 0;
  const int lead = run * kQuarter;
  return row + lead < kRun ? ahead.next + lead * row_bytes
                           : ahead.after + (lead - kRun) * row_bytes;
}

// Rows before its turn a row of a run comes from L2 into L1.
constexpr int kRowsAhead = kQuarter;
HWY_INLINE ptrdiff_t NearOf(const Ahead& ahead, int row, int64_t row_bytes) {
  return row + kRowsAhead < kRun ? kRowsAhead * row_bytes
                                 : ahead.follows + (kRowsAhead - kRun) * row_bytes;
}

// Far ahead, into L2: L1 is full of the rows at hand.
HWY_INLINE void PrefetchToL2(const void* address) {
  __builtin_prefetch(address, /*rw=*/0, /*locality=*/2);
}

// Elements `index` .. `index` + kCount of a row, at `at`, are about to be read. Fetches the
// same of a row soon to come into L1, and the line `ahead` bytes off into L2: the two take
// turns at the few buffers between L1 and L2, which would else be full of what memory owes
// when the arithmetic needs a line of L2. Where several passes share a line, the first
// fetches near rows, and each the far rows of some of the `turn`s, evenly over time.
template <int kCount, typename T>
HWY_INLINE void FetchAhead(const T* at, int index, int turn, ptrdiff_t near, ptrdiff_t ahead) {
  constexpr int kInLine = 64 / sizeof(T);
  constexpr int kPasses = HWY_MAX(kInLine / kCount, 1);
  const int pass = index / kCount % kPasses;
  for (int i = 0; i < kCount; i += kInLine) {
    const auto* line = reinterpret_cast<const std::byte*>(at + i);
    if (pass == 0) __builtin_prefetch(line + near, /*rw=*/0, /*locality=*/3);
    if (turn % kPasses != pass) continue;
    PrefetchToL2(line + ahead);
  }
}

// What will soon be written: scratch that may have left the caches since.
HWY_INLINE void FetchRow(const float* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(float)) {
    __builtin_prefetch(row + i, /*rw=*/1, /*locality=*/3);
  }
}

// Whether the chunk is whole and all of its slots have positions from 0 to `last`.
HWY_INLINE bool AllVisible(const SlotBlock& block, int first, Position last) {
  if (last < 0 || first + kChunk > block.count) return false;
  const hn::RebindToUnsigned<DF> words;
  auto largest = hn::Zero(words);  // no position is a very large one
  for (int i = 0; i < kChunk; i += kLanes) {
    const auto* from = reinterpret_cast<const uint32_t*>(block.positions + first + i);
    largest = hn::Max(largest, hn::LoadU(words, from));
  }
  return hn::AllFalse(words, hn::Gt(largest, hn::Set(words, static_cast<uint32_t>(last))));
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

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
