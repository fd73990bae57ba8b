#include "worker/rank/workspace.h"

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/rank/sequence_memory.h"

namespace heavywater {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

// Of max_step_tokens rows each: hidden states, queries or attention, keys or values.
struct RowBytes {
  int64_t hidden = 0;
  int64_t queries = 0;
  int64_t kv = 0;
};
RowBytes RowBytesOf(const RankCacheOptions& options) {
  const KvShape& shape = options.shape;
  if (options.brings_rows) return RowBytes();
  const int64_t rows = int64_t{options.max_step_tokens} * kFloatBytes;
  return {.hidden = rows * options.hidden_size,
          .queries = rows * shape.num_query_heads * shape.head_dim,
          .kv = rows * shape.num_kv_heads * shape.head_dim};
}

}  // namespace

int64_t Workspace::StandingBytes(const RankCacheOptions& options) {
  const RowBytes rows = RowBytesOf(options);
  const int64_t agreement = kStepFields * options.world_size * int64_t{sizeof(int64_t)};
  return 2 * (rows.hidden + rows.queries + rows.kv) + agreement;
}

absl::StatusOr<std::unique_ptr<Workspace>> Workspace::Create(const RankCacheOptions& options,
                                                             DeviceMemory& memory) {
  std::unique_ptr<Workspace> workspace(new Workspace(options, memory));
  HW_RETURN_IF_ERROR(workspace->AllocateRows());
  return workspace;
}

int64_t Workspace::query_width() const {
  return int64_t{options_.shape.num_query_heads} * options_.shape.head_dim;
}

int64_t Workspace::kv_width() const {
  return int64_t{options_.shape.num_kv_heads} * options_.shape.head_dim;
}

absl::Status Workspace::AllocateRows() {
  const RowBytes rows = RowBytesOf(options_);
  HW_ASSIGN_OR_RETURN(rows_reservation_,
                      memory_.Reserve(StandingBytes(options_), "the workspace of a step"));
  HW_ASSIGN_OR_RETURN(extra_logits_reservation_, memory_.Reserve(0, "logits"));

  const auto allocate = [this](int64_t bytes) {
    return memory_.Allocate(MemoryKind::kWorkspace, bytes);
  };
  HW_ASSIGN_OR_RETURN(hidden_, allocate(rows.hidden));
  HW_ASSIGN_OR_RETURN(last_hidden_, allocate(rows.hidden));
  HW_ASSIGN_OR_RETURN(queries_, allocate(rows.queries));
  HW_ASSIGN_OR_RETURN(attention_, allocate(rows.queries));
  HW_ASSIGN_OR_RETURN(keys_, allocate(rows.kv));
  HW_ASSIGN_OR_RETURN(values_, allocate(rows.kv));
  return absl::OkStatus();
}

DeviceSpan<float> Workspace::Rows(const DeviceBuffer& buffer, int64_t rows, int64_t width) const {
  HW_CHECK(rows <= options_.max_step_tokens);
  return buffer.As<float>(0, rows * width);
}

DeviceSpan<float> Workspace::hidden(int64_t rows) const {
  return Rows(hidden_, rows, options_.hidden_size);
}
DeviceSpan<float> Workspace::last_hidden(int64_t rows) const {
  return Rows(last_hidden_, rows, options_.hidden_size);
}
DeviceSpan<float> Workspace::queries(int64_t rows) const {
  return Rows(queries_, rows, query_width());
}
DeviceSpan<float> Workspace::attention(int64_t rows) const {
  return Rows(attention_, rows, query_width());
}
DeviceSpan<float> Workspace::keys(int64_t rows) const { return Rows(keys_, rows, kv_width()); }
DeviceSpan<float> Workspace::values(int64_t rows) const { return Rows(values_, rows, kv_width()); }

AttentionRows Workspace::rows(int64_t rows) const {
  return {
      .queries = queries(rows), .keys = keys(rows), .values = values(rows), .out = attention(rows)};
}

template <typename T>
absl::StatusOr<DeviceSpan<T>> Workspace::Ensure(MemoryKind kind, DeviceBuffer& buffer,
                                                int64_t count) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  if (buffer.bytes() < bytes) {
    buffer = DeviceBuffer();  // first, so that old and new never count together
    HW_ASSIGN_OR_RETURN(buffer, memory_.Allocate(kind, bytes));
  }
  return buffer.As<T>(0, count);
}

absl::StatusOr<DeviceSpan<int64_t>> Workspace::Gains(int64_t count) {
  return Ensure<int64_t>(MemoryKind::kWorkspace, gains_, count);
}
absl::StatusOr<DeviceSpan<uint8_t>> Workspace::Masks(int64_t count) {
  return Ensure<uint8_t>(MemoryKind::kWorkspace, masks_, count);
}
absl::StatusOr<DeviceSpan<int32_t>> Workspace::Victims(int64_t count) {
  return Ensure<int32_t>(MemoryKind::kWorkspace, victims_, count);
}
absl::StatusOr<DeviceSpan<int64_t>> Workspace::VictimScores(int64_t count) {
  return Ensure<int64_t>(MemoryKind::kWorkspace, victim_scores_, count);
}
absl::StatusOr<DeviceSpan<int64_t>> Workspace::ExposedValues(int64_t count) {
  return Ensure<int64_t>(MemoryKind::kWorkspace, exposed_values_, count);
}
absl::StatusOr<DeviceSpan<std::byte>> Workspace::Scratch(int64_t bytes) {
  return Ensure<std::byte>(MemoryKind::kScratch, scratch_, bytes);
}
absl::StatusOr<DeviceSpan<Position>> Workspace::CandidatePositions(int64_t count) {
  return Ensure<Position>(MemoryKind::kWorkspace, candidate_positions_, count);
}
absl::StatusOr<DeviceSpan<int64_t>> Workspace::CandidateScores(int64_t count) {
  return Ensure<int64_t>(MemoryKind::kWorkspace, candidate_scores_, count);
}
absl::StatusOr<DeviceSpan<float>> Workspace::Logits(int64_t rows) {
  return Ensure<float>(MemoryKind::kWorkspace, logits_, rows * options_.vocab_size);
}
absl::StatusOr<DeviceSpan<float>> Workspace::TurnedQueries(int64_t rows) {
  return Ensure<float>(MemoryKind::kWorkspace, turned_queries_, rows * query_width());
}
absl::StatusOr<DeviceSpan<std::byte>> Workspace::TurnedKeys(int64_t bytes) {
  return Ensure<std::byte>(MemoryKind::kWorkspace, turned_keys_, bytes);
}

absl::Status Workspace::ReserveExtraLogits(int64_t rows) {
  const int64_t bytes = rows * options_.vocab_size * kFloatBytes;
  if (bytes <= extra_logits_reservation_.bytes()) return absl::OkStatus();
  return extra_logits_reservation_.Extend(bytes, "logits of every token");
}

void Workspace::TrimGains() {
  gains_ = DeviceBuffer();
  masks_ = DeviceBuffer();
  victims_ = DeviceBuffer();
  victim_scores_ = DeviceBuffer();
  candidate_positions_ = DeviceBuffer();
  candidate_scores_ = DeviceBuffer();
  exposed_values_ = DeviceBuffer();
  scratch_ = DeviceBuffer();
  turned_queries_ = DeviceBuffer();
  turned_keys_ = DeviceBuffer();
}

void Workspace::Trim() {
  TrimGains();
  logits_ = DeviceBuffer();
  extra_logits_reservation_.Resize(0);
}

}  // namespace heavywater
