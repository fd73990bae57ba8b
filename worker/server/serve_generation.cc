#include "worker/server/serve_generation.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "worker/server/follower.h"
#include "worker/server/policy_proto.h"
#include "worker/server/rank_zero.h"
#include "worker/server/serve_attention.h"

namespace heavywater {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(100);
// What the other ranks get, beyond drain_ms, to hear of the end from rank 0.
constexpr absl::Duration kFollowerGrace = absl::Seconds(2);

// The rank's own loop on a thread: rank 0 schedules, the others follow.
class StepThread {
 public:
  template <typename Loop>
  explicit StepThread(Loop loop)
      : thread_([this, loop] {
          status_ = loop();
          ended_ = true;
        }) {}
  ~StepThread() { Join().IgnoreError(); }
  bool ended() const { return ended_; }
  absl::Status Join() {
    if (thread_.joinable()) thread_.join();
    return status_;
  }

 private:
  absl::Status status_;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

class GenerationServer {
 public:
  GenerationServer(const v1::WorkerConfig& config, const ModelFacts& facts, Worker& worker,
                   WorkerMetrics& metrics, ServerRuntime& runtime, GenerationService& service,
                   ShutdownSignal& signal)
      : config_(config),
        facts_(facts),
        worker_(worker),
        metrics_(metrics),
        runtime_(runtime),
        service_(service),
        signal_(signal) {}

  absl::Status Run(const CommunicatorFactory& connect) {
    while (true) {
      const absl::Status status = config_.rank() == 0 ? Lead() : Follow();
      if (status.ok() || told_to_stop_ || !MayFormAgain(config_, status)) return End(status);
      LogWarn("the group has failed; it forms again",
              {{"group", config_.group()}, {"error", status.ToString()}});
      metrics_.CountFailedFormation();
      const absl::Status formed = FormAgain(connect);
      if (!formed.ok()) return End(told_to_stop_ ? absl::OkStatus() : formed);
    }
  }

 private:
  // Until the loop ends or the signal comes.
  void Watch(StepThread& step) {
    while (!step.ended() && !told_to_stop_) {
      told_to_stop_ = signal_.WaitFor(kPoll);
      UpdateLinkMetrics(worker_, metrics_);
      worker_.LeaveLostService();
    }
  }

  absl::Status Lead() {
    HW_ASSIGN_OR_RETURN(const OnHostFull on_host_full, ParseOnHostFull(config_.on_host_full()));
    RankZero rank_zero(config_, facts_, on_host_full, worker_, metrics_);
    StepThread step([&] { return rank_zero.scheduler().Run(); });
    service_.Serve(rank_zero.engine());
    runtime_.SetReady(true);
    Watch(step);
    if (told_to_stop_) {
      LogInfo("draining", {{"running", rank_zero.scheduler().num_running()}});
      runtime_.BeginDrain();
      rank_zero.Refuse();
      runtime_.Drain();
      rank_zero.scheduler().Stop();
    }
    runtime_.SetReady(false);
    const absl::Status status = step.ended() ? step.Join() : absl::OkStatus();
    service_.StopServing([this, status] { return Incomplete(status); });
    return step.Join();
  }

  absl::Status Follow() {
    StepThread step([&] {
      return RunFollower(worker_.runner(), metrics_, absl::Milliseconds(config_.comm_timeout_ms()));
    });
    runtime_.SetReady(true);
    Watch(step);
    runtime_.SetReady(false);
    if (!told_to_stop_) return step.Join();
    runtime_.BeginDrain();
    // Rank 0 was told to stop, too, as a rule, and ends the group in order.
    const absl::Time deadline =
        absl::Now() + absl::Milliseconds(config_.drain_ms()) + kFollowerGrace;
    while (!step.ended() && absl::Now() < deadline) absl::SleepFor(kPoll);
    const bool in_order = step.ended();
    if (!in_order) {
      worker_.runner().communicator().Abort(absl::CancelledError("this rank was told to stop"));
    }
    const absl::Status status = step.Join();
    return in_order ? status : absl::OkStatus();
  }

  absl::Status FormAgain(const CommunicatorFactory& connect) {
    StopFlag stop;
    SignalWatch watch(signal_, stop);
    const absl::Status formed = worker_.Reform(config_, facts_, connect, stop);
    told_to_stop_ = stop.stopped();
    return formed;
  }

  absl::Status End(const absl::Status& status) {
    runtime_.BeginDrain();
    runtime_.Drain();
    return status;
  }

  std::string Incomplete(const absl::Status& failure) const {
    const CacheLink* link = worker_.link();
    const std::string waiting = link == nullptr ? "" : link->waiting_for();
    return absl::StrCat("group \"", config_.group(), "\" of ", config_.size(),
                        " ranks is not complete: ", waiting.empty() ? "" : waiting + "; ",
                        failure.ok() ? "it ends" : failure.ToString());
  }

  const v1::WorkerConfig& config_;
  const ModelFacts& facts_;
  Worker& worker_;
  WorkerMetrics& metrics_;
  ServerRuntime& runtime_;
  GenerationService& service_;
  ShutdownSignal& signal_;
  bool told_to_stop_ = false;
};

}  // namespace

SignalWatch::SignalWatch(ShutdownSignal& signal, StopFlag& stop)
    : thread_([this, &signal, &stop] {
        while (!done_ && !signal.WaitFor(kPoll)) {
        }
        if (!done_) stop.Stop();
      }) {}

SignalWatch::~SignalWatch() {
  done_ = true;
  thread_.join();
}

absl::Status ServeGeneration(const v1::WorkerConfig& config, const ModelFacts& facts,
                             const CommunicatorFactory& connect, Worker& worker,
                             WorkerMetrics& metrics, ServerRuntime& runtime,
                             GenerationService& service, ShutdownSignal& signal) {
  return GenerationServer(config, facts, worker, metrics, runtime, service, signal).Run(connect);
}

}  // namespace heavywater
