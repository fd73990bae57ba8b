// The gRPC shell of an engine's attention.
#pragma once

#include <atomic>

#include "heavywater/v1/attention.grpc.pb.h"
#include "worker/server/attention_host.h"

namespace heavywater {

// Thread safe. UNAVAILABLE until Serve() and after StopServing().
class AttentionService final : public v1::AttentionService::Service {
 public:
  // `host` outlives the server.
  void Serve(AttentionHost& host) { host_ = &host; }
  void StopServing() { host_ = nullptr; }

  grpc::Status Attach(grpc::ServerContext* context, const v1::AttachEngineRequest* request,
                      v1::AttachEngineResponse* response) override;
  grpc::Status Step(grpc::ServerContext* context,
                    grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* stream) override;
  grpc::Status Kept(grpc::ServerContext* context, const v1::KeptRequest* request,
                    grpc::ServerWriter<v1::KeptResponse>* writer) override;
  grpc::Status ReadKv(grpc::ServerContext* context, const v1::ReadKvRequest* request,
                      grpc::ServerWriter<v1::ReadKvResponse>* writer) override;

 private:
  absl::StatusOr<AttentionHost*> Host() const;

  std::atomic<AttentionHost*> host_ = nullptr;
};

}  // namespace heavywater
