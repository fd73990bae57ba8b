// Device rows that steps and chunks of prompts work in. One at a time uses them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/cache/device_memory.h"
#include "worker/rank/attention_rows.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

class Workspace {
 public:
  // Holds max_step_tokens rows from the start. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<Workspace>> Create(const RankCacheOptions& options,
                                                           DeviceMemory& memory);

  // What Create() reserves.
  static int64_t StandingBytes(const RankCacheOptions& options);

  // The first `rows` of each; rows <= max_step_tokens. Contents are whatever the
  // last user left. Hidden rows have no size where there is no model.
  DeviceSpan<float> hidden(int64_t rows) const;       // [rows][hidden_size]
  DeviceSpan<float> last_hidden(int64_t rows) const;  // [rows][hidden_size], rows for logits
  DeviceSpan<float> queries(int64_t rows) const;      // [rows][num_query_heads][head_dim]
  DeviceSpan<float> keys(int64_t rows) const;         // [rows][num_kv_heads][head_dim]
  DeviceSpan<float> values(int64_t rows) const;       // likewise
  DeviceSpan<float> attention(int64_t rows) const;    // like queries
  AttentionRows rows(int64_t rows) const;             // the last four

  // Memory that the sequences of a step have reserved with their admission;
  // valid until the next call of the same function or Trim().
  absl::StatusOr<DeviceSpan<int64_t>> Gains(int64_t count);
  absl::StatusOr<DeviceSpan<uint8_t>> Masks(int64_t count);
  absl::StatusOr<DeviceSpan<Position>> CandidatePositions(int64_t count);
  absl::StatusOr<DeviceSpan<int64_t>> CandidateScores(int64_t count);
  absl::StatusOr<DeviceSpan<int64_t>> ExposedValues(int64_t count);
  absl::StatusOr<DeviceSpan<int32_t>> Victims(int64_t count);
  absl::StatusOr<DeviceSpan<int64_t>> VictimScores(int64_t count);
  absl::StatusOr<DeviceSpan<std::byte>> Scratch(int64_t bytes);  // of Backend::Attend()
  absl::StatusOr<DeviceSpan<float>> Logits(int64_t rows);        // [rows][vocab_size]
  // Positions::kCacheRelative: queries and keys as one attention sees them.
  absl::StatusOr<DeviceSpan<float>> TurnedQueries(int64_t rows);
  absl::StatusOr<DeviceSpan<std::byte>> TurnedKeys(int64_t bytes);
  // Logits rows beyond one for each sequence. RESOURCE_EXHAUSTED.
  absl::Status ReserveExtraLogits(int64_t rows);

  // Gives back what sequences reserved: when one closes, or (without logits)
  // when one needs less.
  void Trim();
  void TrimGains();

 private:
  Workspace(const RankCacheOptions& options, DeviceMemory& memory)
      : options_(options), memory_(memory) {}
  absl::Status AllocateRows();
  template <typename T>
  absl::StatusOr<DeviceSpan<T>> Ensure(MemoryKind kind, DeviceBuffer& buffer, int64_t count);
  DeviceSpan<float> Rows(const DeviceBuffer& buffer, int64_t rows, int64_t width) const;
  int64_t query_width() const;
  int64_t kv_width() const;

  const RankCacheOptions options_;
  DeviceMemory& memory_;
  DeviceMemory::Reservation rows_reservation_;
  DeviceMemory::Reservation extra_logits_reservation_;
  DeviceBuffer hidden_;
  DeviceBuffer last_hidden_;
  DeviceBuffer queries_;
  DeviceBuffer keys_;
  DeviceBuffer values_;
  DeviceBuffer attention_;
  DeviceBuffer gains_;
  DeviceBuffer masks_;
  DeviceBuffer victims_;
  DeviceBuffer victim_scores_;
  DeviceBuffer candidate_positions_;
  DeviceBuffer candidate_scores_;
  DeviceBuffer exposed_values_;
  DeviceBuffer scratch_;
  DeviceBuffer turned_queries_;
  DeviceBuffer turned_keys_;
  DeviceBuffer logits_;
};

}  // namespace heavywater
