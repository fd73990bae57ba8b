#include "worker/server/attention_host.h"

#include <functional>
#include <random>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "cache_service/base/version.h"
#include "cache_service/runtime/logging.h"
#include "worker/rank/group_sum.h"
#include "worker/rank/recall_memory.h"
#include "worker/rank/sequence_cache.h"
#include "worker/server/attention_proto.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

constexpr int64_t kMaxReadBytes = 1 << 20;  // of rows in one message
constexpr int64_t kMaxReadPositions = 1 << 20;

template <typename T>
absl::Status CheckSame(const char* field, const T& got, const T& want) {
  if (got == want) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(field, " is ", got, ", want ", want, " as this worker is configured"));
}

uint64_t NewAttachmentId() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;  // never 0
}

}  // namespace

AttentionHost::AttentionHost(AttentionHostOptions options, AttentionEngine& engine,
                             Communicator& communicator, PlanReports& reports, CacheLink* link,
                             RemoteHostTier* tier, WorkerMetrics& metrics)
    : options_(std::move(options)),
      engine_(engine),
      communicator_(communicator),
      reports_(reports),
      sequences_(link),
      tier_(tier),
      metrics_(metrics),
      memory_(engine.cache()) {}

absl::Status AttentionHost::CheckRefusing() const {
  if (!refusing_) return absl::OkStatus();
  return absl::UnavailableError("the worker is draining");
}

absl::Status AttentionHost::CheckAttach(const v1::AttachEngineRequest& request) const {
  HW_RETURN_IF_ERROR(CheckSame("group", request.group(), options_.group));
  HW_RETURN_IF_ERROR(CheckSame("rank", request.rank(), cache_options().rank));
  HW_RETURN_IF_ERROR(CheckSame("size", request.size(), cache_options().world_size));
  HW_RETURN_IF_ERROR(CheckSame("num_layers", request.num_layers(), shape().num_layers));
  HW_RETURN_IF_ERROR(
      CheckSame("num_query_heads", request.num_query_heads(), shape().total_query_heads));
  HW_RETURN_IF_ERROR(CheckSame("num_kv_heads", request.num_kv_heads(), shape().total_kv_heads));
  HW_RETURN_IF_ERROR(CheckSame("head_dim", request.head_dim(), shape().head_dim));
  return CheckSame("dtype", request.dtype(), std::string(KvDtypeName(shape().dtype)));
}

absl::StatusOr<v1::AttachEngineResponse> AttentionHost::Attach(
    const v1::AttachEngineRequest& request) {
  HW_RETURN_IF_ERROR(CheckAttach(request));
  MutexLock lock(&mutex_);
  HW_RETURN_IF_ERROR(CheckRefusing());
  if (stream_open_) {
    return absl::FailedPreconditionError(
        "another engine's Step stream is open on this rank, want it ended first");
  }
  attachment_id_ = NewAttachmentId();
  v1::AttachEngineResponse response;
  response.set_attachment_id(attachment_id_);
  response.set_first_query_head(cache_options().rank * shape().num_query_heads);
  response.set_num_query_heads(shape().num_query_heads);
  response.set_first_kv_head(shape().first_kv_head);
  response.set_num_kv_heads(shape().num_kv_heads);
  response.set_max_step_tokens(cache_options().max_step_tokens);
  *response.mutable_fingerprint() = options_.fingerprint;
  response.set_default_policy(options_.default_policy);
  response.set_server_version(kVersion);
  return response;
}

absl::Status AttentionHost::BeginStream(uint64_t attachment_id) {
  MutexLock lock(&mutex_);
  HW_RETURN_IF_ERROR(CheckRefusing());
  if (stream_open_) {
    return absl::FailedPreconditionError("a Step stream is open on this rank, want one at a time");
  }
  if (attachment_id == 0 || attachment_id != attachment_id_) {
    return absl::FailedPreconditionError(
        absl::StrCat("attachment_id is ", attachment_id, ", want that of the last Attach"));
  }
  stream_open_ = true;
  LogInfo("an engine drives this rank");
  return absl::OkStatus();
}

void AttentionHost::EndStream() {
  MutexLock lock(&mutex_);
  engine_.Abandon(absl::CancelledError("the engine's stream has ended"));
  const std::set<SequenceId> open = open_;
  for (SequenceId sequence : open) {
    const absl::Status closed = Close(sequence);
    if (!closed.ok()) {
      LogError("sequence not closed", {{"sequence", sequence}, {"error", closed.ToString()}});
    }
  }
  stream_open_ = false;
  attachment_id_ = 0;
  LogInfo("the engine has gone", {{"sequences_closed", open.size()}});
}

absl::Status AttentionHost::Handle(const v1::StepRequest& request, v1::StepResponse& response) {
  MutexLock lock(&mutex_);
  const StepPhaseScope phase(StepPhase::kOther);
  const absl::Time start = absl::Now();
  const absl::Status status = Answer(request, response);
  step_time_ += absl::Now() - start;
  if (group_status_.ok()) group_status_ = engine_.group_status();
  if (!group_status_.ok()) {
    group_failed_ = true;
    return absl::UnavailableError(
        absl::StrCat("the worker group failed: ", group_status_.ToString()));
  }
  if (!status.ok()) FillError(status, *response.mutable_error());
  response.set_in_step(engine_.in_step());
  metrics_.Update(engine_.cache());
  return absl::OkStatus();
}

absl::Status AttentionHost::Answer(const v1::StepRequest& request, v1::StepResponse& response) {
  if (request.attachment_id() != 0 && request.attachment_id() != attachment_id_) {
    return absl::InvalidArgumentError(
        absl::StrCat("attachment_id is ", request.attachment_id(), ", want the stream's or none"));
  }
  switch (request.request_case()) {
    case v1::StepRequest::kOpen:
      return Open(request.open(), *response.mutable_opened());
    case v1::StepRequest::kBegin:
      return Begin(request.begin(), *response.mutable_begun());
    case v1::StepRequest::kAttend:
      return Attend(request.attend(), *response.mutable_attended());
    case v1::StepRequest::kEnd:
      return End(*response.mutable_ended());
    case v1::StepRequest::kClose:
      response.mutable_closed();
      HW_RETURN_IF_ERROR(CheckOpen(request.close().sequence_id()));
      return Close(request.close().sequence_id());
    case v1::StepRequest::REQUEST_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("request is absent, want open, begin, attend, end or close");
}

absl::Status AttentionHost::Open(const v1::OpenAttention& open, v1::OpenedAttention& opened) {
  HW_RETURN_IF_ERROR(CheckRefusing());
  if (engine_.in_step()) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", engine_.step(), " has not ended, want its layers and end first"));
  }
  HW_ASSIGN_OR_RETURN(SequenceOptions options, SequenceFromProto(open, options_.default_policy));
  options.on_host_full = options_.on_host_full;
  HW_RETURN_IF_ERROR(CheckRecall(cache_options(), options, tier_ != nullptr));
  HW_ASSIGN_OR_RETURN(const Budget budget, ResolveSequenceBudget(shape(), options));
  HW_RETURN_IF_ERROR(memory_.Check(options));
  const std::string tenant = open.tenant().empty() ? "default" : open.tenant();
  HW_ASSIGN_OR_RETURN(const OpenedSequence registered,
                      Register({.options = options, .budget = budget, .tenant = tenant}));
  if (absl::Status status = OpenInCache(registered, options); !status.ok()) {
    if (cache_options().rank == 0) sequences_.Release(registered.id, /*discard=*/true);
    return status;
  }
  open_.insert(registered.id);
  metrics_.SetSequences(0, static_cast<int64_t>(open_.size()));
  opened.set_sequence_id(registered.id);
  *opened.mutable_budget() = BudgetToProto(options.policy, budget);
  const int sets = SetLayoutOf(cache_options(), options.policy.scope).own_sets;
  opened.set_prompt_bytes(DeviceLayerBytes(shape(), sets, options.prompt_tokens).total() *
                          WholeLayers(shape(), options));
  return absl::OkStatus();
}

absl::StatusOr<OpenedSequence> AttentionHost::Register(const SequenceToOpen& sequence) {
  absl::StatusOr<OpenedSequence> opened = OpenedSequence();
  const bool first = cache_options().rank == 0;
  if (first) opened = sequences_.Open(sequence);
  absl::Status agreed;
  RankCache& cache = engine_.cache();
  group_status_ =
      AgreeOnStatus(opened.status(), cache.backend(), communicator_, cache.stream(), agreed);
  HW_RETURN_IF_ERROR(group_status_);
  HW_RETURN_IF_ERROR(agreed);
  std::vector<int64_t> numbers(2, 0);
  if (first) numbers = {static_cast<int64_t>(opened->id), absl::ToInt64Milliseconds(opened->lease)};
  auto sums = SumOverRanks(std::move(numbers), cache.backend(), communicator_, cache.stream());
  group_status_ = sums.status();
  HW_RETURN_IF_ERROR(group_status_);
  return OpenedSequence{.id = static_cast<SequenceId>((*sums)[0]),
                        .lease = absl::Milliseconds((*sums)[1])};
}

absl::Status AttentionHost::OpenInCache(const OpenedSequence& registered,
                                        const SequenceOptions& options) {
  if (tier_ == nullptr) return engine_.Open(registered.id, options);
  tier_->Expect(registered.id, options.max_tokens, registered.lease);
  const absl::Status opened = engine_.Open(registered.id, options);
  // Where another rank has failed it was open for a moment, and is closing.
  if (!opened.ok()) tier_->Forget(registered.id);
  return opened;
}

absl::Status AttentionHost::Begin(const v1::BeginStep& begin, v1::BegunStep& begun) {
  HW_ASSIGN_OR_RETURN(const std::vector<EngineItem> items, EngineItemsFromProto(begin));
  HW_RETURN_IF_ERROR(engine_.Begin(items));
  step_time_ = absl::ZeroDuration();
  begun.set_step(engine_.step());
  for (const absl::Status& status : engine_.item_status()) {
    AddItemStatus(status, *begun.mutable_items());
  }
  return absl::OkStatus();
}

absl::Status AttentionHost::Attend(const v1::AttendLayer& attend, v1::AttendedLayer& attended) {
  HW_ASSIGN_OR_RETURN(const std::vector<float> queries,
                      FloatsFromBytes("queries", attend.queries()));
  HW_ASSIGN_OR_RETURN(const std::vector<float> keys, FloatsFromBytes("keys", attend.keys()));
  HW_ASSIGN_OR_RETURN(const std::vector<float> values, FloatsFromBytes("values", attend.values()));
  std::vector<float> out(queries.size());
  HW_RETURN_IF_ERROR(engine_.AttendHost(
      attend.layer(), {.queries = queries, .keys = keys, .values = values, .out = out}));
  attended.set_out(out.data(), out.size() * sizeof(float));
  return absl::OkStatus();
}

absl::Status AttentionHost::End(v1::EndedStep& ended) {
  HW_RETURN_IF_ERROR(engine_.End());
  bool decoded = false;
  for (size_t i = 0; i < engine_.items().size(); ++i) {
    const absl::Status& status = engine_.item_status()[i];
    AddItemStatus(status, *ended.mutable_items());
    if (!status.ok()) continue;
    decoded = decoded || engine_.items()[i].phase == EnginePhase::kDecode;
    HW_RETURN_IF_ERROR(AfterItem(static_cast<int>(i)));
  }
  metrics_.ObserveStep(decoded ? "decode" : "prompt", step_time_);
  return absl::OkStatus();
}

absl::Status AttentionHost::AfterItem(int index) {
  const EngineItem& item = engine_.items()[static_cast<size_t>(index)];
  if (item.phase == EnginePhase::kDecode) {
    metrics_.AddTokens(item.num_tokens);
  } else {
    metrics_.AddPromptTokens(item.num_tokens);
  }
  if (item.phase == EnginePhase::kPromptLast) {
    return reports_.Report(item.sequence, /*with_sets=*/true).status();
  }
  if (!engine_.planned(index)) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(const SequenceStats stats, engine_.cache().Stats(item.sequence));
  const bool with_sets = (stats.plans + 1) % options_.report_interval_plans == 0;
  return reports_.Report(item.sequence, with_sets).status();
}

absl::Status AttentionHost::CheckOpen(SequenceId sequence) const {
  if (open_.contains(sequence)) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("sequence ", sequence, " is not open in this stream"));
}

absl::Status AttentionHost::Close(SequenceId sequence) {
  HW_RETURN_IF_ERROR(engine_.CheckNotInStep(sequence));
  metrics_.Update(engine_.cache(), /*now=*/true);
  // The report comes first: the cache forgets the sequence.
  HW_ASSIGN_OR_RETURN(const SequenceCache* cache, engine_.cache().Find(sequence));
  const bool reportable = cache->prompt_done();
  if (reportable) HW_RETURN_IF_ERROR(reports_.Report(sequence, /*with_sets=*/true).status());
  HW_RETURN_IF_ERROR(engine_.Close(sequence));
  open_.erase(sequence);
  const std::function<void()> report_finished = reports_.Close(sequence);
  if (tier_ != nullptr) {
    tier_->WhenWritten(sequence, report_finished);
  } else {
    report_finished();
  }
  if (cache_options().rank == 0) sequences_.Release(sequence, /*discard=*/!reportable);
  metrics_.SetSequences(0, static_cast<int64_t>(open_.size()));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::KeptResponse>> AttentionHost::Kept(const v1::KeptRequest& request) {
  MutexLock lock(&mutex_);
  HW_RETURN_IF_ERROR(CheckOpen(request.sequence_id()));
  HW_ASSIGN_OR_RETURN(const KeptSequence kept, engine_.Kept(request.sequence_id()));
  HW_ASSIGN_OR_RETURN(const SequenceStats stats, engine_.cache().Stats(request.sequence_id()));
  HW_ASSIGN_OR_RETURN(SequenceCache * sequence, engine_.cache().Find(request.sequence_id()));
  return KeptToProto(kept, stats, sequence->recall() != nullptr);
}

absl::StatusOr<v1::ReadKvResponse> AttentionHost::ReadKv(const v1::ReadKvRequest& request,
                                                         int64_t first_position) {
  const int64_t count = request.num_positions();
  if (count < 1 || count > kMaxReadPositions) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_positions is ", count, ", want 1 to ", kMaxReadPositions));
  }
  const int head = OwnHead(request.kv_head());
  if (head < 0 || head >= shape().num_kv_heads) {
    return absl::InvalidArgumentError(
        absl::StrCat("kv_head is ", request.kv_head(), ", want ", shape().first_kv_head, " to ",
                     shape().first_kv_head + shape().num_kv_heads - 1, ", those of this rank"));
  }
  MutexLock lock(&mutex_);
  HW_RETURN_IF_ERROR(CheckOpen(request.sequence_id()));
  HW_RETURN_IF_ERROR(engine_.CheckOutOfStep());
  HW_ASSIGN_OR_RETURN(const SequenceStats stats, engine_.cache().Stats(request.sequence_id()));
  if (request.first_position() < 0 || request.first_position() > stats.tokens_seen - count) {
    return absl::OutOfRangeError(absl::StrCat(count, " positions from ", request.first_position(),
                                              " on are asked for, want them within the ",
                                              stats.tokens_seen, " seen"));
  }
  v1::ReadKvResponse response;
  response.set_first_position(first_position);
  const int64_t end = request.first_position() + count;
  std::string& rows = *response.mutable_rows();
  for (int64_t position = first_position;
       position < end && static_cast<int64_t>(rows.size()) < kMaxReadBytes; ++position) {
    HW_ASSIGN_OR_RETURN(const std::vector<std::byte> row,
                        engine_.ReadKv(request.sequence_id(), request.layer(), head,
                                       static_cast<Position>(position)));
    rows.append(reinterpret_cast<const char*>(row.data()), row.size());
  }
  response.set_crc32c(Crc32c(std::as_bytes(std::span(rows))));
  return response;
}

}  // namespace heavywater
