// The gRPC shell of text generation.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/mutex.h"
#include "cache_service/runtime/access.h"
#include "heavywater/v1/generation.grpc.pb.h"
#include "worker/server/generation_engine.h"

namespace heavywater {

// Thread safe. UNAVAILABLE until Serve() and after StopServing().
class GenerationService final : public v1::GenerationService::Service {
 public:
  // Says what the service waits for while it serves nobody.
  using Waiting = std::function<std::string()>;

  // `model`: what GetModel streams; known before the group has formed. `access`: says for
  // which tenant a caller acts; null: whichever the request names. It must outlive this.
  explicit GenerationService(
      std::vector<v1::GetModelResponse> model,
      Waiting waiting = [] { return "the worker group is not ready"; },
      const Access* access = nullptr)
      : model_(std::move(model)), access_(access), waiting_(std::move(waiting)) {}

  // `engine` lives until StopServing() has returned.
  void Serve(GenerationEngine& engine);
  // New calls are refused with `waiting` from now on; calls under way, whose sequences
  // have ended, get a moment to tell their clients, and then are cancelled. Returns
  // when there are none.
  void StopServing(Waiting waiting);

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override;
  grpc::Status GetModel(grpc::ServerContext* context, const v1::GetModelRequest* request,
                        grpc::ServerWriter<v1::GetModelResponse>* writer) override;

 private:
  // Null, and why, when it serves nobody.
  absl::StatusOr<GenerationEngine*> Enter(grpc::ServerContext& context);
  void Exit(grpc::ServerContext& context);

  const std::vector<v1::GetModelResponse> model_;
  const Access* const access_;
  Mutex mutex_;
  CondVar changed_;
  GenerationEngine* engine_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Waiting waiting_ ABSL_GUARDED_BY(mutex_);
  std::set<grpc::ServerContext*> calls_ ABSL_GUARDED_BY(mutex_);  // under way
};

}  // namespace heavywater
