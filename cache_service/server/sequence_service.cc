#include "cache_service/server/sequence_service.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/trace_context.h"
#include "cache_service/server/unary.h"

namespace heavywater {
namespace {

// Streams messages that are there already.
class SetsStream final : public grpc::ServerWriteReactor<v1::SequenceSet> {
 public:
  explicit SetsStream(absl::StatusOr<std::vector<v1::SequenceSet>> sets) {
    if (!sets.ok()) {
      Finish(ToGrpcStatus(sets.status()));
      return;
    }
    sets_ = *std::move(sets);
    WriteNext();
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::CANCELLED);
      return;
    }
    ++next_;
    WriteNext();
  }
  void OnDone() override { delete this; }

 private:
  void WriteNext() {
    if (next_ == sets_.size()) {
      Finish(grpc::Status::OK);
    } else {
      StartWrite(&sets_[next_]);
    }
  }

  std::vector<v1::SequenceSet> sets_;
  size_t next_ = 0;
};

}  // namespace

template <typename Response>
grpc::ServerUnaryReactor* SequenceService::Answer(grpc::CallbackServerContext* context,
                                                  SequenceId id, Response* response,
                                                  std::function<absl::StatusOr<Response>()> call) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  AnswerHere(context, reactor, id, response, std::move(call));
  return reactor;
}

template <typename Response>
void SequenceService::AnswerHere(grpc::CallbackServerContext* context,
                                 grpc::ServerUnaryReactor* reactor, SequenceId id,
                                 Response* response,
                                 std::function<absl::StatusOr<Response>()> call) {
  const ScopedTrace trace(*context);
  absl::StatusOr<Response> answer = call();
  if (id == 0 || bring_ == nullptr || !absl::IsNotFound(answer.status())) {
    if (answer.ok()) *response = *std::move(answer);
    reactor->Finish(ToGrpcStatus(answer.status()));
    return;
  }
  bring_(id, access_.ViewerOf(*context), [=](const absl::Status& brought) {
    const ScopedTrace later(*context);
    absl::StatusOr<Response> again = brought.ok() ? call() : absl::StatusOr<Response>(brought);
    if (again.ok()) *response = *std::move(again);
    reactor->Finish(ToGrpcStatus(again.status()));
  });
}

template <typename Response>
grpc::ServerUnaryReactor* SequenceService::AnswerLater(
    Executor& executor, grpc::CallbackServerContext* context, SequenceId id, Response* response,
    std::function<absl::StatusOr<Response>()> call) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::Status scheduled = executor.Schedule([=, this] {
    if (context->IsCancelled()) return reactor->Finish(grpc::Status::CANCELLED);
    AnswerHere(context, reactor, id, response, call);
  });
  if (!scheduled.ok()) {
    reactor->Finish(ToGrpcStatus(absl::UnavailableError(
        absl::StrCat("too much waits for the tiers below host memory: ", scheduled.message()))));
  }
  return reactor;
}

grpc::ServerUnaryReactor* SequenceService::Open(grpc::CallbackServerContext* context,
                                                const v1::OpenSequenceRequest* request,
                                                v1::OpenSequenceResponse* response) {
  const ScopedTrace trace(*context);
  if (const absl::Status open = gate_.CheckNew(); !open.ok()) return Finish(context, open);
  Executor& executor = registry_.sequences().OpenMayWait(*request) ? bring_ups_ : opens_;
  return AnswerLater<v1::OpenSequenceResponse>(executor, context, 0, response, [=, this] {
    auto opened = registry_.Open(*request);
    if (opened.ok()) {
      LogInfo("sequence opened", {{"sequence", opened->sequence_id()},
                                  {"group", request->group()},
                                  {"tenant", request->tenant()},
                                  {"prompt_tokens", request->prompt_tokens()},
                                  {"policy", request->budget().policy()}});
    } else {
      LogWarn("sequence refused",
              {{"group", request->group()}, {"status", opened.status().ToString()}});
    }
    return opened;
  });
}

grpc::ServerUnaryReactor* SequenceService::Get(grpc::CallbackServerContext* context,
                                               const v1::GetSequenceRequest* request,
                                               v1::Sequence* response) {
  return Answer<v1::Sequence>(context, request->sequence_id(), response, [=, this] {
    return registry_.sequences().Get(request->sequence_id(), request->first_token(),
                                     access_.ViewerOf(*context));
  });
}

grpc::ServerUnaryReactor* SequenceService::List(grpc::CallbackServerContext* context,
                                                const v1::ListSequencesRequest* request,
                                                v1::ListSequencesResponse* response) {
  return Finish(context, registry_.sequences().List(*request, access_.ViewerOf(*context)),
                response);
}

grpc::ServerUnaryReactor* SequenceService::Close(grpc::CallbackServerContext* context,
                                                 const v1::CloseSequenceRequest* request,
                                                 v1::CloseSequenceResponse* response) {
  using Closed = absl::StatusOr<v1::CloseSequenceResponse>;
  return Answer<v1::CloseSequenceResponse>(
      context, request->sequence_id(), response, [=, this]() -> Closed {
        const absl::Status status =
            registry_.sequences().Close(*request, access_.ViewerOf(*context));
        if (!status.ok()) return status;
        LogInfo("sequence closed", {{"sequence", request->sequence_id()}});
        return v1::CloseSequenceResponse();
      });
}

grpc::ServerUnaryReactor* SequenceService::Reopen(grpc::CallbackServerContext* context,
                                                  const v1::ReopenSequenceRequest* request,
                                                  v1::ReopenSequenceResponse* response) {
  const ScopedTrace trace(*context);
  if (const absl::Status open = gate_.Check(); !open.ok()) return Finish(context, open);
  const SequenceId id = request->sequence_id();
  return AnswerLater<v1::ReopenSequenceResponse>(bring_ups_, context, id, response, [=, this] {
    auto reopened = registry_.Reopen(*request, [=] { return context->IsCancelled(); });
    LogInfo("sequence reopened", {{"sequence", request->sequence_id()},
                                  {"group", request->group()},
                                  {"tokens_seen", reopened.ok() ? reopened->tokens_seen() : 0},
                                  {"status", reopened.status().ToString()}});
    return reopened;
  });
}

grpc::ServerUnaryReactor* SequenceService::Suspend(grpc::CallbackServerContext* context,
                                                   const v1::SuspendSequenceRequest* request,
                                                   v1::SuspendSequenceResponse* response) {
  return Answer<v1::SuspendSequenceResponse>(context, request->sequence_id(), response, [=, this] {
    auto suspended = registry_.sequences().Suspend(*request, access_.ViewerOf(*context));
    if (suspended.ok()) {
      LogInfo("sequence suspended",
              {{"sequence", request->sequence_id()}, {"ttl_ms", suspended->ttl_ms()}});
      // Where too much waits already it comes when its pages move.
      (void)bring_ups_.Schedule(
          [this, id = request->sequence_id()] { registry_.sequences().SealPages(id); });
    }
    return suspended;
  });
}

grpc::ServerUnaryReactor* SequenceService::Resume(grpc::CallbackServerContext* context,
                                                  const v1::ResumeSequenceRequest* request,
                                                  v1::ResumeSequenceResponse* response) {
  return Answer<v1::ResumeSequenceResponse>(context, request->sequence_id(), response, [=, this] {
    return registry_.sequences().Resume(*request, access_.ViewerOf(*context));
  });
}

grpc::ServerUnaryReactor* SequenceService::Truncate(grpc::CallbackServerContext* context,
                                                    const v1::TruncateSequenceRequest* request,
                                                    v1::TruncateSequenceResponse* response) {
  return Answer<v1::TruncateSequenceResponse>(context, request->sequence_id(), response, [=, this] {
    auto truncated = registry_.sequences().Truncate(*request, access_.ViewerOf(*context));
    if (truncated.ok()) {
      LogInfo("sequence goes back",
              {{"sequence", request->sequence_id()}, {"tokens", request->tokens()}});
    }
    return truncated;
  });
}

grpc::ServerUnaryReactor* SequenceService::Fork(grpc::CallbackServerContext* context,
                                                const v1::ForkSequenceRequest* request,
                                                v1::ForkSequenceResponse* response) {
  const ScopedTrace trace(*context);
  if (const absl::Status open = gate_.CheckNew(); !open.ok()) return Finish(context, open);
  return AnswerLater<v1::ForkSequenceResponse>(bring_ups_, context, 0, response, [=, this] {
    auto forked = registry_.sequences().Fork(*request, access_.ViewerOf(*context));
    if (forked.ok()) {
      LogInfo("sequence forked", {{"sequence", request->sequence_id()},
                                  {"new_sequence", forked->sequence_id()},
                                  {"shared_tokens", forked->shared_tokens()}});
    }
    return forked;
  });
}

grpc::ServerUnaryReactor* SequenceService::ReadSnapshot(grpc::CallbackServerContext* context,
                                                        const v1::ReadSnapshotRequest* request,
                                                        v1::ReadSnapshotResponse* response) {
  return Finish(context, registry_.sequences().ReadSnapshot(*request), response);
}

grpc::ServerWriteReactor<v1::SequenceSet>* SequenceService::GetSets(
    grpc::CallbackServerContext* context, const v1::GetSetsRequest* request) {
  return new SetsStream(registry_.sequences().GetSets(*request, access_.ViewerOf(*context)));
}

}  // namespace heavywater
