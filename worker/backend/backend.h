// The device as the rank sees it: coarse operations on a bounded KV cache. One
// conformance suite runs over every implementation; `reference` (scalar, double)
// is the oracle.
//
// All operations are asynchronous on `stream`, in order; inputs that lie in host
// memory (item lists, slots, params) are read before the call returns. Shapes
// are checked by the caller once (at open), not per token: an operation's
// Status reports what the device reports.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/device_buffer.h"
#include "worker/backend/recall.h"
#include "worker/cache/kv_layout.h"
#include "worker/policy/policy.h"
#include "worker/policy/selection.h"

namespace heavywater {

// The slots of one layer of one sequence on one rank. Scope `layer` has one set
// (num_sets == 1) that all KV heads share; scope `kv_head` has one per KV head.
// The set of KV head h is num_sets == 1 ? 0 : h.
struct LayerView {
  DeviceSpan<std::byte> keys;      // [num_kv_heads][capacity][head_dim] of the KV dtype
  DeviceSpan<std::byte> values;    // [num_kv_heads][capacity][head_dim] of the KV dtype
  DeviceSpan<Position> positions;  // [num_sets][capacity], kNoPosition = free
  DeviceSpan<int64_t> scores;      // [num_sets][capacity] ledger of the residents, 2^-32
  DeviceSpan<int64_t> gains;       // [num_kv_heads][capacity] attention received since the
                                   // last CollectGains, 2^-32
  int num_sets = 1;
  int64_t capacity = 0;  // slots per set (the stride)
  int64_t used = 0;      // slots [0, used) may hold positions; kernels look no further
};

// New tokens of one sequence in a batch.
struct AppendItem {
  LayerView layer;
  int64_t first_token = 0;  // its first row in the batch's K and V
  int64_t num_tokens = 0;
  Position first_position = 0;
  std::span<const int32_t> slots;  // host memory, [num_sets][num_tokens]: where each goes
};

// Where one KV head's row of a token goes in host memory: written as K then V
// in the KV dtype (cache_service/tier/page_geometry.h). Null: not written.
struct HostRow {
  std::byte* row = nullptr;
};

struct AppendParams {
  std::span<const AppendItem> items;
  DeviceSpan<const float> keys;        // [num_tokens][num_kv_heads][head_dim], rotated
  DeviceSpan<const float> values;      // [num_tokens][num_kv_heads][head_dim]
  std::span<const HostRow> host_rows;  // [num_tokens][num_kv_heads], or empty: no write-through
};

// The queries of one sequence in a batch: num_tokens rows from first_token, at
// positions first_position + i. Query i attends to every slot whose position is
// at most its own.
struct AttendItem {
  LayerView layer;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
  Position first_position = 0;
  bool accumulate_gains = true;             // add to layer.gains ...
  GainKind gains = GainKind::kProbability;  // ... this
  // Step 2: each query also attends, in the same softmax, to what it picks among
  // the demoted positions. Null: no recall. Outlives the call.
  const RecallView* recall = nullptr;
};

struct AttendParams {
  std::span<const AttendItem> items;
  DeviceSpan<const float> queries;  // [num_tokens][num_query_heads][head_dim], rotated
  DeviceSpan<float> out;            // [num_tokens][num_query_heads][head_dim]
  // At least AttendScratchBytes() of the largest capacity and limits of the items.
  DeviceSpan<std::byte> scratch;
  float scale = 0;  // of the logits, 1 / sqrt(head_dim) as a rule
};

// A chunk of a prompt over one layer's whole KV: slot == position, so
// layer.positions is not read. Query i (position first_position + i) attends to
// positions 0 .. first_position + i. Queries at positions >= score_from add
// what `gains` says to layer.gains (column sums).
struct PromptParams {
  LayerView layer;
  int64_t num_tokens = 0;
  Position first_position = 0;
  Position score_from = 0;
  GainKind gains = GainKind::kProbability;
  DeviceSpan<const float> queries;  // [num_tokens][num_query_heads][head_dim]
  DeviceSpan<float> out;            // [num_tokens][num_query_heads][head_dim]
  // At least PromptScratchBytes() of first_position + num_tokens.
  DeviceSpan<std::byte> scratch;
  float scale = 0;
};

// Chooses within each set. `kept` gets 1 where the slot stays, 0 where it goes
// or is free.
struct SelectParams {
  DeviceSpan<const Position> positions;  // [num_sets][stride], kNoPosition = free
  DeviceSpan<const int64_t> scores;      // [num_sets][stride]
  DeviceSpan<uint8_t> kept;              // [num_sets][count]
  int num_sets = 1;
  int64_t stride = 0;
  int64_t count = 0;  // candidates per set, from its start
  SelectionParams selection;
};

// Whom Select() gave up: of each set the slots below `used` that hold a position
// and are not kept, ascending, with their scores. Unused entries of `victims` are
// -1, of `victim_scores` 0. FAILED_PRECONDITION (at the latest when the stream is
// synchronised) when a set has more than max_victims.
struct VictimsParams {
  DeviceSpan<const Position> positions;  // [num_sets][stride], kNoPosition = free
  DeviceSpan<const int64_t> scores;      // [num_sets][stride]
  DeviceSpan<const uint8_t> kept;        // [num_sets][kept_stride]
  DeviceSpan<int32_t> victims;           // [num_sets][max_victims]
  DeviceSpan<int64_t> victim_scores;     // [num_sets][max_victims]
  int num_sets = 1;
  int64_t stride = 0;
  int64_t kept_stride = 0;
  int64_t used = 0;
  int64_t max_victims = 0;
};

// Keys that are stored unrotated (Positions::kCacheRelative), turned for one attention:
// slot s of set i to the angles of places[i][s], its index by order within the cache.
struct RotateKeysParams {
  LayerView layer;
  std::span<const int32_t> places;  // host memory, [num_sets][used]; of free slots any
  DeviceSpan<const float> angles;   // [num_places][head_dim]: of each place head_dim / 2
                                    // cosines, then as many sines
  DeviceSpan<std::byte> to;         // [num_kv_heads][capacity][head_dim] of the KV dtype
};

// Query rows likewise, to places[row]; a row at kNoPlace is copied as it is.
inline constexpr int32_t kNoPlace = -1;
struct RotateQueriesParams {
  DeviceSpan<const float> from;     // [num_rows][num_query_heads][head_dim]
  DeviceSpan<float> to;             // likewise; not `from`
  std::span<const int32_t> places;  // host memory, [num_rows]
  DeviceSpan<const float> angles;   // as above
};

// What attention works in, known without a device: admission and plans of
// deployments count with it.
class ScratchSizes {
 public:
  virtual ~ScratchSizes() = default;

  // What Attend() needs beside its inputs and results for sequences of up to
  // `capacity` slots and recall within `recall`, in any batch, and AttendPrompt() for
  // prompts of up to `num_keys` tokens. Pure, and never less for more of anything.
  virtual int64_t AttendScratchBytes(const KvShape& shape, int64_t capacity,
                                     const RecallLimits& recall = {}) const {
    return 0;
  }
  virtual int64_t PromptScratchBytes(const KvShape& shape, int64_t num_keys) const { return 0; }
};

class Backend : public ScratchSizes {
 public:
  // "reference", "cpu-avx2", "cpu-avx512", ...
  virtual std::string Name() const = 0;

  // INVALID_ARGUMENT naming the field when this backend cannot run the shape.
  virtual absl::Status CheckShape(const KvShape& shape) const = 0;

  // Memory, zeroed. RESOURCE_EXHAUSTED when the device has none left.
  virtual absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes) = 0;
  virtual absl::Status CopyToDevice(DeviceSpan<std::byte> to, std::span<const std::byte> from,
                                    Stream& stream) = 0;
  // `to` is valid after Synchronize().
  virtual absl::Status CopyToHost(std::span<std::byte> to, DeviceSpan<const std::byte> from,
                                  Stream& stream) = 0;
  // Within the device; not overlapping. This default goes through the host: a
  // backend that can do better overrides it.
  virtual absl::Status CopyOnDevice(DeviceSpan<std::byte> to, DeviceSpan<const std::byte> from,
                                    Stream& stream);
  virtual absl::Status Zero(DeviceSpan<std::byte> span, Stream& stream) = 0;
  virtual absl::Status Synchronize(Stream& stream) = 0;

  // A queue of work of its own; lives as long as the backend. On a backend whose
  // calls have finished when they return every stream is the same.
  virtual absl::StatusOr<Stream> NewStream() { return Stream(); }

  // Host memory that operations reach (host pages, rows of AppendParams): to be
  // registered before its first use, for as long as the device may use it. Whole
  // mappings, not parts. Does nothing where device memory is host memory.
  virtual absl::Status RegisterHostMemory(std::span<std::byte> memory) { return absl::OkStatus(); }
  virtual absl::Status UnregisterHostMemory(std::span<std::byte> memory) {
    return absl::OkStatus();
  }

  // Whether recall can leave out pages that rest (RecallView::resting).
  virtual bool CanRest() const { return false; }

  // Step 1: K and V of new tokens into their slots (converted to the KV dtype),
  // positions set, scores and gains of those slots zeroed, and the same bytes
  // to the open host pages.
  virtual absl::Status Append(const KvShape& shape, const AppendParams& params, Stream& stream) = 0;

  // Steps 2 and 3: one softmax per query over the slots and its picks, one pass
  // over K and V; the probabilities, each rounded to 2^-32 on its own, are added
  // to the gains of the KV head (picks: to recall->gains); with GainKind::kPivotal
  // 2^32 for each that is above the threshold of the query's position, in slots only
  // (that kind goes without recall). A ragged batch equals
  // each sequence alone, bit for bit.
  //
  // The pick, per token and KV head: from the sketch, a position's logit for query
  // head g is estimated as
  //   e_g = scale * (sum over chosen c of q_c minimum_c + sum over others of q_c mean_c)
  //         + w_g * (sum over chosen c of weight_gc code_c)
  // with weight_gc = round(scale q_c step_c / w_g) in int8 and w_g = max over c of
  // |scale q_c step_c| / 127; its estimated probability is exp(e_g - LSE_g), LSE_g
  // the log-sum-exp of the slots' exact logits; its value the mean over the
  // group's query heads. Of those with a value of at least min_share, the
  // max_picks largest are picked, ties to the lower position. A query that sees no
  // slot has nothing to compare with: it picks nothing, except in mode `all`.
  virtual absl::Status Attend(const KvShape& shape, const AttendParams& params, Stream& stream) = 0;

  // One chunk of an exact prompt.
  virtual absl::Status AttendPrompt(const KvShape& shape, const PromptParams& params,
                                    Stream& stream) = 0;

  // RoPE (arXiv:2104.09864) at attention: of each row x, the pair x[i], x[i + head_dim / 2]
  // becomes x[i] cos - x[i + head_dim / 2] sin, x[i + head_dim / 2] cos + x[i] sin, in
  // float; keys are rounded to the KV dtype once more.
  virtual absl::Status RotateKeys(const KvShape& shape, const RotateKeysParams& params,
                                  Stream& stream) = 0;
  virtual absl::Status RotateQueries(const KvShape& shape, const RotateQueriesParams& params,
                                     Stream& stream) = 0;

  // Before the reduce: to[set][slot] = sum of the set's heads' gains for slots
  // [0, used); the gains become 0. `to` is [num_sets][used].
  virtual absl::Status CollectGains(const KvShape& shape, const LayerView& layer,
                                    DeviceSpan<int64_t> to, Stream& stream) = 0;

  // to[r] = sum of from[r][0 .. count), at most the largest integer, or -1 where one
  // is negative: what to check a row's mass by. `from` is [num_rows][count].
  virtual absl::Status SumRows(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to,
                               int64_t num_rows, int64_t count, Stream& stream) = 0;

  // After the reduce: score = round(score * decay) + from[set][slot]; `from` is
  // [num_sets][used]. decay 1.0 changes no bit.
  virtual absl::Status AddScores(const LayerView& layer, DeviceSpan<const int64_t> from,
                                 double decay, Stream& stream) = 0;

  // Votes of SnapKV: to[r][i] = pool over from[r][i - kernel/2 .. i + kernel/2]
  // (outside counts as 0). Average yields the sum: the order is the same and
  // integers stay exact. `from` and `to` are [num_rows][count], not aliased.
  virtual absl::Status PoolVotes(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to,
                                 int num_rows, int64_t count, Pooling pooling, int kernel,
                                 Stream& stream) = 0;

  // Step 5's choice; equals SelectKept() bit for bit.
  virtual absl::Status Select(const SelectParams& params, Stream& stream) = 0;
  virtual absl::Status CollectVictims(const VictimsParams& params, Stream& stream) = 0;

  // End of the prompt: slots 0, 1, ... of `to` get the rows `kept` (host memory,
  // [num_sets][kept_per_set] ascending positions) of the prompt's layer, with
  // positions; scores of set s come from seeds[s][position] ([num_sets][seed_stride])
  // or become 0 when `seeds` is empty; gains become 0. Other slots become free.
  virtual absl::Status GatherSlots(const KvShape& shape, const LayerView& from, const LayerView& to,
                                   std::span<const Position> kept, int64_t kept_per_set,
                                   DeviceSpan<const int64_t> seeds, int64_t seed_stride,
                                   Stream& stream) = 0;

  // Recall: the sketches, and positions that come back (recall.h).
  virtual absl::Status ObserveQueries(const KvShape& shape, const ObserveQueriesParams& params,
                                      Stream& stream) = 0;
  virtual absl::Status ChooseChannels(const KvShape& shape, const ChooseChannelsParams& params,
                                      Stream& stream) = 0;
  virtual absl::Status EncodePages(const KvShape& shape, const EncodePagesParams& params,
                                   Stream& stream) = 0;
  virtual absl::Status PromoteSlots(const KvShape& shape, const LayerView& layer,
                                    const PromoteParams& params, Stream& stream) = 0;

  // Frees slots of one set: position kNoPosition, score and gains 0. `slots` is
  // host memory.
  virtual absl::Status ReleaseSlots(const KvShape& shape, const LayerView& layer, int set,
                                    std::span<const int32_t> slots, Stream& stream) = 0;
};

inline absl::Status Backend::CopyOnDevice(DeviceSpan<std::byte> to,
                                          DeviceSpan<const std::byte> from, Stream& stream) {
  std::vector<std::byte> bytes(from.size());
  if (absl::Status status = CopyToHost(bytes, from, stream); !status.ok()) return status;
  if (absl::Status status = Synchronize(stream); !status.ok()) return status;
  return CopyToDevice(to, bytes, stream);
}

// The scalar oracle, in double. Slow.
std::unique_ptr<Backend> CreateReferenceBackend();

struct CpuBackendOptions {
  int num_threads = 1;          // of the backend's own pool, the caller's included
  std::string target = "best";  // "best", "avx2" or "avx512"
};
// Highway kernels, dispatched at run time. FAILED_PRECONDITION when the machine
// lacks the target asked for.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options);

}  // namespace heavywater
