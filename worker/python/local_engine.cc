#include "worker/python/local_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "cache_service/base/status.h"
#include "worker/python/gpu_backend.h"
#include "worker/rank/check_finite.h"

namespace heavywater {
namespace {

// A group of one waits for nobody.
constexpr absl::Duration kCollectiveTimeout = absl::Seconds(30);
constexpr int kMaxThreads = 256;
constexpr int kMaxGpus = 256;

// -1: the CPU.
absl::StatusOr<int> ParseDevice(const std::string& name) {
  if (name == "cpu") return -1;
  absl::string_view number = name;
  int gpu = 0;
  if (absl::ConsumePrefix(&number, "cuda:") && absl::SimpleAtoi(number, &gpu) && gpu >= 0 &&
      gpu < kMaxGpus) {
    return gpu;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("device is \"", name, "\", want \"cpu\" or \"cuda:0\" and so on"));
}

}  // namespace

LocalDevice::LocalDevice(std::unique_ptr<Backend> backend, int gpu, int64_t host_memory_bytes)
    : backend_(std::move(backend)),
      gpu_(gpu),
      // What the CPU's backend is told of memory is nothing.
      tier_(host_memory_bytes,
            {.on_allocated =
                 [&backend = *backend_](auto memory) { return backend.RegisterHostMemory(memory); },
             .on_freeing = [&backend = *backend_](
                               auto memory) { return backend.UnregisterHostMemory(memory); }}) {}

absl::StatusOr<std::shared_ptr<LocalDevice>> LocalDevice::Create(
    const LocalDeviceOptions& options) {
  if (options.num_threads < 1 || options.num_threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_threads is ", options.num_threads, ", want 1 to ", kMaxThreads));
  }
  if (options.host_memory_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("host_memory_bytes is ", options.host_memory_bytes, ", want 0 or more"));
  }
  HW_ASSIGN_OR_RETURN(const int gpu, ParseDevice(options.device));
  std::unique_ptr<Backend> backend;
  if (gpu >= 0) {
    HW_ASSIGN_OR_RETURN(backend, CreateGpuBackend(gpu));
  } else {
    HW_ASSIGN_OR_RETURN(
        backend, CreateCpuBackend({.num_threads = options.num_threads, .target = options.target}));
  }
  return std::shared_ptr<LocalDevice>(
      new LocalDevice(std::move(backend), gpu, options.host_memory_bytes));
}

std::string LocalDevice::name() const { return gpu_ < 0 ? "cpu" : absl::StrCat("cuda:", gpu_); }

int64_t LocalDevice::host_bytes() {
  const std::lock_guard lock(mutex_);
  return tier_.reserved_bytes();
}

absl::StatusOr<std::unique_ptr<LocalEngine>> LocalEngine::Create(
    std::shared_ptr<LocalDevice> device, const RankCacheOptions& options,
    std::shared_ptr<EngineGroup> group) {
  const std::lock_guard lock(device->mutex());
  // Without room for pages nothing is demoted: what leaves the device is dropped.
  HostTier* tier = device->tier().limit_bytes() > 0 ? &device->tier() : nullptr;
  HW_ASSIGN_OR_RETURN(std::unique_ptr<RankCache> cache,
                      RankCache::Create(options, device->backend(), tier));
  return std::unique_ptr<LocalEngine>(
      new LocalEngine(std::move(device), std::move(cache), std::move(group)));
}

LocalEngine::LocalEngine(std::shared_ptr<LocalDevice> device, std::unique_ptr<RankCache> cache,
                         std::shared_ptr<EngineGroup> group)
    : device_(std::move(device)), group_(std::move(group)), cache_(std::move(cache)) {
  if (group_ == nullptr) alone_ = CreateLocalGroup(1, kCollectiveTimeout);
  Communicator& communicator = group_ == nullptr ? *alone_[0] : group_->communicator();
  engine_ = std::make_unique<AttentionEngine>(*cache_, communicator);
}

LocalEngine::~LocalEngine() {
  const std::lock_guard lock(device_->mutex());
  engine_.reset();
  cache_.reset();
}

absl::Status LocalEngine::Open(SequenceId sequence, const SequenceOptions& options) {
  const std::lock_guard lock(device_->mutex());
  return engine_->Open(sequence, options);
}

absl::Status LocalEngine::Fork(SequenceId sequence, LocalEngine& from, SequenceId source) {
  if (from.device_ != device_) {
    return absl::InvalidArgumentError("the source engine is of another device, want the same");
  }
  const std::lock_guard lock(device_->mutex());
  return engine_->Fork(sequence, *from.engine_, source);
}

absl::Status LocalEngine::Truncate(SequenceId sequence, int64_t tokens) {
  const std::lock_guard lock(device_->mutex());
  return engine_->Truncate(sequence, tokens);
}

absl::StatusOr<std::vector<std::byte>> LocalEngine::SaveState(SequenceId sequence) {
  const std::lock_guard lock(device_->mutex());
  return engine_->SaveState(sequence);
}

absl::StatusOr<std::vector<std::byte>> LocalEngine::ReadPage(SequenceId sequence, int64_t page) {
  const std::lock_guard lock(device_->mutex());
  return engine_->ReadPage(sequence, page);
}

absl::Status LocalEngine::LoadState(SequenceId sequence, const SequenceOptions& options,
                                    std::span<const std::byte> state,
                                    std::span<const std::span<const std::byte>> pages,
                                    int64_t tokens_seen) {
  const std::lock_guard lock(device_->mutex());
  return engine_->LoadState(sequence, options, state, pages, tokens_seen);
}

absl::Status LocalEngine::Close(SequenceId sequence) {
  const std::lock_guard lock(device_->mutex());
  return engine_->Close(sequence);
}

absl::Status LocalEngine::Begin(std::span<const EngineItem> items) {
  const std::lock_guard lock(device_->mutex());
  return engine_->Begin(items);
}

absl::Status LocalEngine::Attend(int layer, const CallerRows& rows) {
  const std::lock_guard lock(device_->mutex());
  HW_RETURN_IF_ERROR(CheckRows(rows));
  const int64_t query_width = int64_t{shape().num_query_heads} * shape().head_dim;
  const int64_t kv_width = int64_t{shape().num_kv_heads} * shape().head_dim;
  const bool alone =
      engine_->items().size() == 1 && engine_->items()[0].phase != EnginePhase::kDecode;
  // Before the first part, since a refusal takes nothing in.
  if (alone && rows.rows > engine_->rows_left()) {
    return absl::InvalidArgumentError(absl::StrCat("queries have ", rows.rows,
                                                   " rows, want at most the ", engine_->rows_left(),
                                                   " that are left"));
  }
  const int64_t most = alone ? int64_t{cache_->options().max_step_tokens} : rows.rows;
  int64_t done = 0;
  do {
    const int64_t count = std::min(most, rows.rows - done);
    HW_RETURN_IF_ERROR(AttendPart(layer, {.rows = count,
                                          .queries = rows.queries + done * query_width,
                                          .keys = rows.keys + done * kv_width,
                                          .values = rows.values + done * kv_width,
                                          .out = rows.out + done * query_width}));
    done += count;
  } while (done < rows.rows);
  return absl::OkStatus();
}

absl::Status LocalEngine::CheckRows(const CallerRows& rows) const {
  if (device_->gpu() >= 0) return absl::OkStatus();
  const int64_t queries = rows.rows * shape().num_query_heads * shape().head_dim;
  const int64_t keys = rows.rows * shape().num_kv_heads * shape().head_dim;
  HW_RETURN_IF_ERROR(CheckFinite("queries", {rows.queries, static_cast<size_t>(queries)}));
  HW_RETURN_IF_ERROR(CheckFinite("keys", {rows.keys, static_cast<size_t>(keys)}));
  return CheckFinite("values", {rows.values, static_cast<size_t>(keys)});
}

absl::Status LocalEngine::AttendPart(int layer, const CallerRows& rows) {
  const int64_t queries = rows.rows * shape().num_query_heads * shape().head_dim;
  const int64_t keys = rows.rows * shape().num_kv_heads * shape().head_dim;
  // The caller's memory is as good as the backend's own.
  HW_RETURN_IF_ERROR(
      engine_->Attend(layer, {.queries = DeviceSpan<const float>(rows.queries, queries),
                              .keys = DeviceSpan<const float>(rows.keys, keys),
                              .values = DeviceSpan<const float>(rows.values, keys),
                              .out = DeviceSpan<float>(rows.out, queries)}));
  return device_->backend().Synchronize(cache_->stream());
}

absl::Status LocalEngine::End() {
  const std::lock_guard lock(device_->mutex());
  HW_RETURN_IF_ERROR(engine_->End());
  for (const absl::Status& status : engine_->item_status()) HW_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

void LocalEngine::Abandon() {
  const std::lock_guard lock(device_->mutex());
  engine_->Abandon(absl::CancelledError("the caller has given the step up"));
}

absl::StatusOr<SequenceStats> LocalEngine::Stats(SequenceId sequence) {
  const std::lock_guard lock(device_->mutex());
  return cache_->Stats(sequence);
}

absl::StatusOr<KeptSequence> LocalEngine::Kept(SequenceId sequence) {
  const std::lock_guard lock(device_->mutex());
  return engine_->Kept(sequence);
}

absl::StatusOr<std::vector<std::byte>> LocalEngine::ReadKv(SequenceId sequence, int layer,
                                                           int kv_head, Position position) {
  const std::lock_guard lock(device_->mutex());
  return engine_->ReadKv(sequence, layer, kv_head, position);
}

MemoryGauge LocalEngine::kv_bytes() {
  const std::lock_guard lock(device_->mutex());
  return cache_->memory().kv_gauge();
}

}  // namespace heavywater
