// The gRPC shell of text generation.
#pragma once

#include <atomic>
#include <vector>

#include "heavywater/v1/generation.grpc.pb.h"
#include "worker/server/generation_engine.h"

namespace heavywater {

// Thread safe. UNAVAILABLE until Serve() and after StopServing().
class GenerationService final : public v1::GenerationService::Service {
 public:
  // What GetModel streams; known before the group has formed.
  explicit GenerationService(std::vector<v1::GetModelResponse> model) : model_(std::move(model)) {}

  // `engine` outlives the server.
  void Serve(GenerationEngine& engine) { engine_ = &engine; }
  void StopServing() { engine_ = nullptr; }

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override;
  grpc::Status GetModel(grpc::ServerContext* context, const v1::GetModelRequest* request,
                        grpc::ServerWriter<v1::GetModelResponse>* writer) override;

 private:
  const std::vector<v1::GetModelResponse> model_;
  std::atomic<GenerationEngine*> engine_ = nullptr;
};

}  // namespace heavywater
