#include "cache_service/server/watch_streams.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/validate.h"
#include "cache_service/runtime/grpc_status.h"

namespace heavywater {

namespace {

constexpr int64_t kMinIntervalMs = 100;
constexpr int64_t kDefaultIntervalMs = 1000;
constexpr int64_t kMaxIntervalMs = 3'600'000;

}  // namespace

// One message at a time: while a slow reader has not taken it, nothing is made. Deletes
// itself.
class WatchStream final : public grpc::ServerWriteReactor<v1::WatchResponse> {
 public:
  WatchStream(WatchStreams& all, absl::Duration interval, int64_t after)
      : all_(all), interval_(interval), after_(after) {}

  bool IsDue(absl::Time now) {
    MutexLock lock(&mutex_);
    return !writing_ && !finished_ && now >= next_;
  }

  void Send(absl::Time now, const v1::StatsResponse& stats) {
    {
      MutexLock lock(&mutex_);
      if (writing_ || finished_) return;
      next_ = now + interval_;
      message_.Clear();
      *message_.mutable_stats() = stats;
      after_ = all_.events_.AddTo(after_, &message_);
      writing_ = true;
    }
    StartWrite(&message_);  // nothing is finished while this is under way
  }

  void End(const grpc::Status& status) {
    {
      MutexLock lock(&mutex_);
      if (finished_) return;
      if (writing_) {
        end_ = status;
        return;
      }
      finished_ = true;
    }
    Finish(status);
  }

  void OnWriteDone(bool ok) override {
    std::optional<grpc::Status> end;
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      end = std::exchange(end_, std::nullopt);
    }
    if (!ok) end = grpc::Status::CANCELLED;
    if (end.has_value()) End(*end);
  }
  void OnCancel() override { End(grpc::Status::CANCELLED); }
  void OnDone() override {
    all_.Remove(this);
    delete this;
  }

 private:
  WatchStreams& all_;
  const absl::Duration interval_;
  Mutex mutex_;
  v1::WatchResponse message_;
  int64_t after_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_) = std::nullopt;
};

absl::Status WatchStreams::CheckStart(const v1::WatchRequest& request) {
  if (request.interval_ms() != 0) {
    HW_RETURN_IF_ERROR(
        CheckInt("interval_ms", request.interval_ms(), kMinIntervalMs, kMaxIntervalMs));
  }
  const int64_t last = events_.last();
  HW_RETURN_IF_ERROR(CheckInt("after_event", request.after_event(), 0, last));
  MutexLock lock(&mutex_);
  if (stopped_) return absl::UnavailableError("the cache service is ending");
  if (streams_.size() < kMaxStreams) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(streams_.size(), " streams watch already, the limit is ", kMaxStreams));
}

grpc::ServerWriteReactor<v1::WatchResponse>* WatchStreams::Start(const v1::WatchRequest& request) {
  const int64_t interval_ms =
      request.interval_ms() == 0 ? kDefaultIntervalMs : request.interval_ms();
  const absl::Status status = CheckStart(request);
  auto* const stream =
      new WatchStream(*this, absl::Milliseconds(interval_ms),
                      request.after_event() == 0 ? events_.last() : request.after_event());
  {
    MutexLock lock(&mutex_);
    streams_.insert(stream);
  }
  if (status.ok()) {
    stream->StartSendInitialMetadata();  // whoever has it misses no event from here on
  } else {
    stream->End(ToGrpcStatus(status));
  }
  return stream;
}

void WatchStreams::Tick() {
  const absl::Time now = clock_.Now();
  MutexLock lock(&mutex_);
  std::optional<v1::StatsResponse> stats;
  for (WatchStream* const stream : streams_) {
    if (!stream->IsDue(now)) continue;
    if (!stats.has_value()) stats = stats_.Collect();
    stream->Send(now, *stats);
  }
}

void WatchStreams::Stop() {
  MutexLock lock(&mutex_);
  stopped_ = true;
  for (WatchStream* const stream : streams_) {
    stream->End(ToGrpcStatus(absl::UnavailableError("the cache service is ending")));
  }
}

void WatchStreams::Remove(WatchStream* stream) {
  MutexLock lock(&mutex_);
  streams_.erase(stream);
}

}  // namespace heavywater
