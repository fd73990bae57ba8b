// PageStoreService: a thin shell over PageHandlers.
#pragma once

#include "cache_service/runtime/access.h"
#include "cache_service/server/drain_gate.h"
#include "cache_service/server/page_handlers.h"
#include "heavywater/v1/page_store.grpc.pb.h"

namespace heavywater {

class PageStoreService final : public v1::PageStoreService::CallbackService {
 public:
  // All must outlive it.
  PageStoreService(PageHandlers& handlers, const DrainGate& gate, const Access& access)
      : handlers_(handlers), gate_(gate), access_(access) {}

  grpc::ServerUnaryReactor* Attach(grpc::CallbackServerContext* context,
                                   const v1::AttachRequest* request,
                                   v1::AttachResponse* response) override;
  grpc::ServerUnaryReactor* Reserve(grpc::CallbackServerContext* context,
                                    const v1::ReserveRequest* request,
                                    v1::ReserveResponse* response) override;
  grpc::ServerUnaryReactor* Rest(grpc::CallbackServerContext* context,
                                 const v1::RestRequest* request,
                                 v1::RestResponse* response) override;
  grpc::ServerUnaryReactor* Ask(grpc::CallbackServerContext* context, const v1::AskRequest* request,
                                v1::AskResponse* response) override;
  grpc::ServerReadReactor<v1::WriteRequest>* Write(grpc::CallbackServerContext* context,
                                                   v1::WriteResponse* response) override;
  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext* context,
                                   const v1::CommitRequest* request,
                                   v1::CommitResponse* response) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* response) override;
  grpc::ServerWriteReactor<v1::ReadResponse>* Read(grpc::CallbackServerContext* context,
                                                   const v1::ReadRequest* request) override;

 private:
  PageHandlers& handlers_;
  const DrainGate& gate_;
  const Access& access_;
};

}  // namespace heavywater
