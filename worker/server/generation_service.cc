#include "worker/server/generation_service.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>

#include "cache_service/runtime/grpc_status.h"

namespace heavywater {
namespace {

// How soon a client's cancellation is seen while nothing comes.
constexpr absl::Duration kCancelPoll = absl::Milliseconds(50);

// Passes on what the step says until it says no more. True when the client got
// something.
bool Relay(grpc::ServerContext& context, ResponseQueue& responses, GenerationEngine& engine,
           grpc::ServerWriter<v1::GenerateResponse>& writer) {
  bool any = false;
  bool gone = false;
  while (!responses.done()) {
    std::optional<v1::GenerateResponse> response = responses.Pop(kCancelPoll);
    if (gone) continue;
    if (response.has_value() && !context.IsCancelled()) {
      gone = !writer.Write(*response);
      any = any || !gone;
    }
    gone = gone || context.IsCancelled();
    if (!gone) continue;
    responses.Cancel();
    engine.Wake();
  }
  return any;
}

}  // namespace

grpc::Status GenerationService::Generate(grpc::ServerContext* context,
                                         const v1::GenerateRequest* request,
                                         grpc::ServerWriter<v1::GenerateResponse>* writer) {
  GenerationEngine* engine = engine_;
  if (engine == nullptr) {
    return ToGrpcStatus(absl::UnavailableError("the worker group is not ready"));
  }
  const auto generation = engine->Start(*request);
  if (!generation.ok()) return ToGrpcStatus(generation.status());
  const bool any_output = Relay(*context, (*generation)->responses, *engine, *writer);
  engine->End(**generation, any_output);
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
