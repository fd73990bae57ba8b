// BlobService over a BlobStore.
#pragma once

#include <utility>
#include <vector>

#include "cache_service/base/clock.h"
#include "cache_service/base/executor.h"
#include "cache_service/server/blob_streams.h"
#include "cache_service/server/drain_gate.h"
#include "cache_service/tier/blob_store.h"
#include "heavywater/v1/blob.grpc.pb.h"

namespace heavywater {

class BlobService final : public v1::BlobService::CallbackService {
 public:
  // All must outlive it. `tier_threads`: one for each tier below the host's, in their
  // order, so that one that is slow or away holds up nobody else. A Put that stops in the
  // middle of a value is ended after `max_stall`.
  BlobService(BlobStore& blobs, const DrainGate& gate, std::vector<Executor*> tier_threads,
              absl::Duration max_stall, Clock& clock)
      : blobs_(blobs),
        gate_(gate),
        tier_threads_(std::move(tier_threads)),
        puts_(max_stall, clock) {}

  // Time passes; several times a second.
  void Tick() { puts_.Tick(); }

  grpc::ServerReadReactor<v1::PutBlobsRequest>* Put(grpc::CallbackServerContext* context,
                                                    v1::PutBlobsResponse* response) override;
  grpc::ServerWriteReactor<v1::GetBlobsResponse>* Get(grpc::CallbackServerContext* context,
                                                      const v1::GetBlobsRequest* request) override;
  grpc::ServerUnaryReactor* Has(grpc::CallbackServerContext* context,
                                const v1::HasBlobsRequest* request,
                                v1::HasBlobsResponse* response) override;
  grpc::ServerUnaryReactor* Erase(grpc::CallbackServerContext* context,
                                  const v1::EraseBlobsRequest* request,
                                  v1::EraseBlobsResponse* response) override;

 private:
  BlobStore& blobs_;
  const DrainGate& gate_;
  const std::vector<Executor*> tier_threads_;
  PutBlobsStreams puts_;
};

}  // namespace heavywater
