#include "tests/sim/system/sim_process.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/server/split_report.h"

namespace heavywater {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(3);
constexpr int64_t kMaxBatchBytes = 8 << 10;
constexpr size_t kMaxReports = 64;

}  // namespace

SimProcess::SimProcess(SimWorld& world, SimService& service, SimLinkOptions options,
                       int64_t reserve_ahead_tokens)
    : world_(world),
      service_(service),
      caller_(std::make_shared<SimCaller>()),
      link_(world, service, caller_, std::move(options)),
      tier_(world, service, link_, reserve_ahead_tokens),
      queue_(kMaxReports, /*max_bytes=*/int64_t{1} << 20) {
  link_.on_joined = [this] { tier_.AttachAgain(); };
  link_.on_unknown = [this](SequenceId sequence) { tier_.NoteUnknown(sequence); };
}

void SimProcess::Kill() {
  caller_->alive = false;
  tier_.Die();
}

void SimProcess::Poll() {
  tier_.Poll();
  if (sending_ || queue_.size() == 0 || world_.clock.Now() < next_try_) return;
  const std::vector<v1::PlanReport> batch = queue_.Peek(kMaxBatchBytes);
  // Small parts now and then: they come in any number where messages are full.
  const size_t part_bytes = world_.OneIn(4) ? 400 : size_t{1} << 20;
  sending_ = true;
  Send(batch.size() > 1 ? batch : SplitReport(batch[0], part_bytes), 0, batch.size());
}

// A batch goes as one call, the parts of one report one after another.
void SimProcess::Send(std::vector<v1::PlanReport> parts, size_t next, size_t batch) {
  v1::ReportPlanRequest request;
  request.set_group(kSimGroup);
  request.set_rank(link_.options().rank);
  request.set_epoch(link_.epoch());
  const size_t end = batch > 1 ? parts.size() : next + 1;
  for (size_t i = next; i < end; ++i) *request.add_reports() = parts[i];
  world_.network.Call<v1::ReportPlanResponse>(
      caller_, kTimeout,
      [&service = service_, request] { return service.registry().ReportPlan(request); },
      [this, parts = std::move(parts), end,
       batch](const absl::StatusOr<v1::ReportPlanResponse>& result) {
        Sent(result.status(), parts, end, batch);
      });
}

void SimProcess::Sent(const absl::Status& status, std::vector<v1::PlanReport> parts, size_t next,
                      size_t batch) {
  if (absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status)) {
    wrong_ = absl::StrCat("a report was refused: ", status.ToString());
  }
  if (!status.ok()) {
    sending_ = false;
    next_try_ = world_.clock.Now() + world_.Millis(50, 1000);
    return;
  }
  if (next < parts.size()) {
    Send(std::move(parts), next, batch);
    return;
  }
  queue_.Pop(batch);
  sending_ = false;
}

}  // namespace heavywater
