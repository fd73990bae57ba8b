#include "worker/server/generation_service.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/trace_context.h"

namespace heavywater {
namespace {

// How soon a client's cancellation is seen while nothing comes.
constexpr absl::Duration kCancelPoll = absl::Milliseconds(50);
// For calls whose sequences have ended to say so.
constexpr absl::Duration kFarewell = absl::Seconds(1);

// Names the sequence, then passes on what the step says until it says no more. True
// when the client got something.
bool Relay(grpc::ServerContext& context, ServedGeneration& generation, GenerationEngine& engine,
           grpc::ServerWriter<v1::GenerateResponse>& writer) {
  ResponseQueue& responses = generation.responses;
  // Nothing else ends a Write() to a client that does not read.
  responses.OnAbandon([&context] { context.TryCancel(); });
  const absl::Cleanup call_is_over = [&responses] { responses.OnAbandon(nullptr); };
  v1::GenerateResponse accepted;
  accepted.set_sequence_id(generation.sequence);
  bool any = false;
  bool gone = !writer.Write(accepted);
  while (!responses.done()) {
    std::optional<v1::GenerateResponse> response = responses.Pop(kCancelPoll);
    if (response.has_value() && !gone && !context.IsCancelled()) {
      gone = !writer.Write(*response);
      any = any || !gone;
    }
    gone = gone || context.IsCancelled();
    if (!gone || responses.cancelled()) continue;
    responses.Cancel();
    engine.Wake();
  }
  return any;
}

// The client's, or one of its own: told at once, so that whoever reports a fault can name it.
std::string TraceOf(grpc::ServerContext& context) {
  std::string id = TraceIdOf(context);
  if (id.empty()) id = NewTraceId();
  context.AddInitialMetadata("x-trace-id", id);
  return id;
}

}  // namespace

void GenerationService::Serve(GenerationEngine& engine) {
  MutexLock lock(&mutex_);
  engine_ = &engine;
}

void GenerationService::StopServing(Waiting waiting) {
  MutexLock lock(&mutex_);
  engine_ = nullptr;
  waiting_ = std::move(waiting);
  const absl::Time deadline = absl::Now() + kFarewell;
  while (!calls_.empty() && absl::Now() < deadline) {
    changed_.WaitWithTimeout(&mutex_, deadline - absl::Now());
  }
  // Whose clients do not read.
  for (grpc::ServerContext* call : calls_) call->TryCancel();
  while (!calls_.empty()) changed_.WaitWithTimeout(&mutex_, kFarewell);
}

absl::StatusOr<GenerationEngine*> GenerationService::Enter(grpc::ServerContext& context) {
  Waiting waiting;
  {
    MutexLock lock(&mutex_);
    if (engine_ != nullptr) {
      calls_.insert(&context);
      return engine_;
    }
    waiting = waiting_;
  }
  return absl::UnavailableError(waiting());
}

void GenerationService::Exit(grpc::ServerContext& context) {
  MutexLock lock(&mutex_);
  calls_.erase(&context);
  changed_.SignalAll();
}

grpc::Status GenerationService::Generate(grpc::ServerContext* context,
                                         const v1::GenerateRequest* request,
                                         grpc::ServerWriter<v1::GenerateResponse>* writer) {
  const ScopedTrace trace(TraceOf(*context));
  v1::GenerateRequest tenants_own;
  if (access_ != nullptr) {
    const auto tenant = access_->TenantFor(*context, request->tenant());
    if (!tenant.ok()) return ToGrpcStatus(tenant.status());
    if (*tenant != request->tenant()) {
      tenants_own = *request;
      tenants_own.set_tenant(*tenant);
      request = &tenants_own;
    }
  }
  const absl::StatusOr<GenerationEngine*> engine = Enter(*context);
  if (!engine.ok()) return ToGrpcStatus(engine.status());
  const absl::Cleanup exit = [&] { Exit(*context); };
  const auto generation = (*engine)->Start(*request);
  if (!generation.ok()) return ToGrpcStatus(generation.status());
  const bool any_output = Relay(*context, **generation, **engine, *writer);
  (*engine)->End(**generation, any_output);
  return ToGrpcStatus((*generation)->responses.status());
}

grpc::Status GenerationService::GetModel(grpc::ServerContext* context,
                                         const v1::GetModelRequest* request,
                                         grpc::ServerWriter<v1::GetModelResponse>* writer) {
  for (const v1::GetModelResponse& message : model_) {
    if (!writer->Write(message)) break;
  }
  return grpc::Status::OK;
}

}  // namespace heavywater
