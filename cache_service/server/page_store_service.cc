#include "cache_service/server/page_store_service.h"

#include <functional>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/server/unary.h"

namespace heavywater {
namespace {

// Takes chunk after chunk; the first one that fails ends the stream.
class WriteStream final : public grpc::ServerReadReactor<v1::WriteRequest> {
 public:
  WriteStream(PageHandlers& handlers, v1::WriteResponse* response)
      : handlers_(handlers), response_(response) {
    StartRead(&chunk_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      response_->set_rows_written(rows_written_);
      Finish(grpc::Status::OK);
      return;
    }
    const absl::StatusOr<int64_t> rows = handlers_.WriteChunk(chunk_);
    if (!rows.ok()) {
      Finish(ToGrpcStatus(rows.status()));
      return;
    }
    rows_written_ += *rows;
    StartRead(&chunk_);
  }
  void OnDone() override { delete this; }

 private:
  PageHandlers& handlers_;
  v1::WriteResponse* const response_;
  v1::WriteRequest chunk_;
  int64_t rows_written_ = 0;
};

// Reads each chunk when the one before has been taken, so that a slow reader
// holds one chunk of memory and no page.
class ReadStream final : public grpc::ServerWriteReactor<v1::ReadResponse> {
 public:
  ReadStream(PageHandlers& handlers, const v1::ReadRequest& request, const Viewer& viewer)
      : handlers_(handlers), request_(request) {
    const absl::Status status = handlers_.StartRead(request_, viewer);
    if (status.ok()) {
      WriteNext();
    } else {
      Finish(ToGrpcStatus(status));
    }
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::CANCELLED);
    } else if (done_ == request_.num_positions()) {
      Finish(grpc::Status::OK);
    } else {
      WriteNext();
    }
  }
  void OnDone() override { delete this; }

 private:
  // The stream lives until Finish(), so that work which waits for a tier finds it.
  void WriteNext() {
    const absl::Status started =
        handlers_.RunForChunk(request_, done_, [this] { WriteNextChunk(); });
    if (!started.ok()) Finish(ToGrpcStatus(started));
  }

  void WriteNextChunk() {
    const absl::StatusOr<int64_t> rows = handlers_.NextChunk(request_, done_, &chunk_);
    if (!rows.ok()) {
      if (absl::IsDataLoss(rows.status())) {
        LogError("corrupt page", {{"status", rows.status().ToString()}});
      }
      Finish(ToGrpcStatus(rows.status()));
      return;
    }
    done_ += *rows;
    StartWrite(&chunk_);
  }

  PageHandlers& handlers_;
  const v1::ReadRequest request_;
  v1::ReadResponse chunk_;
  int64_t done_ = 0;
};

// Answers a call with what `answer` ends in, on the thread that `run` gives it; `run` may
// refuse, and does not run it then. The call and its messages live until it is answered.
template <typename Run, typename Answer>
grpc::ServerUnaryReactor* FinishLater(grpc::CallbackServerContext* context, const Run& run,
                                      Answer answer) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::Status started =
      run([reactor, answer = std::move(answer)] { reactor->Finish(ToGrpcStatus(answer())); });
  if (!started.ok()) reactor->Finish(ToGrpcStatus(started));
  return reactor;
}

}  // namespace

grpc::ServerUnaryReactor* PageStoreService::Attach(grpc::CallbackServerContext* context,
                                                   const v1::AttachRequest* request,
                                                   v1::AttachResponse* response) {
  if (const absl::Status open = gate_.Check(); !open.ok()) return Finish(context, open);
  return Finish(context, handlers_.Attach(*request), response);
}

grpc::ServerUnaryReactor* PageStoreService::Reserve(grpc::CallbackServerContext* context,
                                                    const v1::ReserveRequest* request,
                                                    v1::ReserveResponse* response) {
  if (const absl::Status open = gate_.Check(); !open.ok()) return Finish(context, open);
  return FinishLater(
      context, [&](std::function<void()> work) { return handlers_.RunForReserve(*request, work); },
      [this, request, response]() -> absl::Status {
        HW_ASSIGN_OR_RETURN(*response, handlers_.Reserve(*request));
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* PageStoreService::Rest(grpc::CallbackServerContext* context,
                                                 const v1::RestRequest* request,
                                                 v1::RestResponse*) {
  // Its rank has given up on it, and may have asked for the pages since: then they are in use.
  if (context->IsCancelled() || absl::FromChrono(context->deadline()) <= absl::Now()) {
    return Finish(context, absl::DeadlineExceededError("the rank does not wait for it any more"));
  }
  return Finish(context, handlers_.Rest(*request));
}

grpc::ServerUnaryReactor* PageStoreService::Ask(grpc::CallbackServerContext* context,
                                                const v1::AskRequest* request,
                                                v1::AskResponse* response) {
  return FinishLater(
      context, [&](std::function<void()> work) { return handlers_.RunForAsk(*request, work); },
      [this, request, response]() -> absl::Status {
        HW_ASSIGN_OR_RETURN(*response, handlers_.Ask(*request));
        return absl::OkStatus();
      });
}

grpc::ServerReadReactor<v1::WriteRequest>* PageStoreService::Write(grpc::CallbackServerContext*,
                                                                   v1::WriteResponse* response) {
  return new WriteStream(handlers_, response);
}

grpc::ServerUnaryReactor* PageStoreService::Commit(grpc::CallbackServerContext* context,
                                                   const v1::CommitRequest* request,
                                                   v1::CommitResponse*) {
  return Finish(context, handlers_.Commit(*request));
}

grpc::ServerUnaryReactor* PageStoreService::Abort(grpc::CallbackServerContext* context,
                                                  const v1::AbortRequest* request,
                                                  v1::AbortResponse* response) {
  return Finish(context, handlers_.Abort(*request), response);
}

grpc::ServerWriteReactor<v1::ReadResponse>* PageStoreService::Read(
    grpc::CallbackServerContext* context, const v1::ReadRequest* request) {
  return new ReadStream(handlers_, *request, access_.ViewerOf(*context));
}

}  // namespace heavywater
