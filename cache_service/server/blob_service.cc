#include "cache_service/server/blob_service.h"

#include "cache_service/base/status.h"
#include "cache_service/server/blob_streams.h"
#include "cache_service/server/unary.h"

namespace heavywater {
namespace {

absl::StatusOr<v1::HasBlobsResponse> HasBlobs(BlobStore& blobs,
                                              const v1::HasBlobsRequest& request) {
  HW_RETURN_IF_ERROR(CheckBlobSpace(request.space()));
  HW_RETURN_IF_ERROR(CheckBlobKeys(request.keys(), /*min_keys=*/1));
  v1::HasBlobsResponse response;
  for (const std::string& key : request.keys()) {
    response.add_present(blobs.Has({request.space(), key}));
  }
  return response;
}

absl::StatusOr<v1::EraseBlobsResponse> EraseBlobs(BlobStore& blobs,
                                                  const v1::EraseBlobsRequest& request) {
  HW_RETURN_IF_ERROR(CheckBlobSpace(request.space()));
  HW_RETURN_IF_ERROR(CheckBlobKeys(request.keys(), /*min_keys=*/0));
  int64_t erased = request.keys().empty() ? blobs.EraseSpace(request.space()) : 0;
  for (const std::string& key : request.keys()) erased += blobs.Erase({request.space(), key});
  v1::EraseBlobsResponse response;
  response.set_erased(erased);
  return response;
}

}  // namespace

grpc::ServerReadReactor<v1::PutBlobsRequest>* BlobService::Put(grpc::CallbackServerContext*,
                                                               v1::PutBlobsResponse* response) {
  return new PutBlobsStream(blobs_, puts_, gate_.CheckNew(), response);
}

grpc::ServerWriteReactor<v1::GetBlobsResponse>* BlobService::Get(
    grpc::CallbackServerContext*, const v1::GetBlobsRequest* request) {
  return new GetBlobsStream(blobs_, tier_threads_, *request);
}

grpc::ServerUnaryReactor* BlobService::Has(grpc::CallbackServerContext* context,
                                           const v1::HasBlobsRequest* request,
                                           v1::HasBlobsResponse* response) {
  return Finish(context, HasBlobs(blobs_, *request), response);
}

grpc::ServerUnaryReactor* BlobService::Erase(grpc::CallbackServerContext* context,
                                             const v1::EraseBlobsRequest* request,
                                             v1::EraseBlobsResponse* response) {
  return Finish(context, EraseBlobs(blobs_, *request), response);
}

}  // namespace heavywater
