// How the ranks form a group, lose one and form again.
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/system/system_simulation.h"

namespace heavywater {

std::unique_ptr<SimProcess> SystemSimulation::NewProcess(int rank) {
  SimLinkOptions options;
  options.rank = rank;
  options.size = size();
  options.instance = absl::StrCat("instance-", ++num_instances_);
  options.fingerprint = fingerprint_;
  auto process = std::make_unique<SimProcess>(world_, service_, std::move(options),
                                              group_options_.reserve_ahead_tokens);
  if (rank != 0) return process;
  process->link().on_suspended = [this](SequenceId id, const v1::HeartbeatResponse&) {
    for (const auto& talk : talks_) {
      if (talk->id != id || talk->where != Talk::Where::kRunning || !formed()) continue;
      world_.trace.Note("leaves the ranks, suspended", id);
      CloseOnRanks(*talk);
    }
  };
  return process;
}

// Each rank closes what it has, without another word, and joins again.
void SystemSimulation::Stop() {
  if (group_ == nullptr) return;
  world_.trace.Note("the group has failed", formed_epoch_);
  for (const auto& talk : talks_) {
    if (talk->where != Talk::Where::kRunning) continue;
    talk->where = Talk::Where::kCutOff;
    rank_zero().link().RemoveSequence(talk->id);
  }
  reports_.clear();
  group_.reset();
  for (const auto& process : processes_) {
    if (process->caller().alive && process->link().epoch() <= formed_epoch_) {
      process->link().Join(formed_epoch_);
    }
  }
}

void SystemSimulation::FormIfAll() {
  if (group_ != nullptr || missing_) return;
  const Epoch epoch = processes_[0]->link().epoch();
  for (const auto& process : processes_) {
    const bool here = process->link().joined() && process->link().epoch() == epoch;
    if (!here || epoch <= formed_epoch_ || !process->tier().attached()) return;
  }
  formed_epoch_ = epoch;
  stopped_ = false;
  world_.trace.Note("the group has formed", epoch);
  TestGroupOptions options = group_options_;
  for (const auto& process : processes_) options.tiers.push_back(&process->tier());
  group_ = std::make_unique<TestGroup>(options);
  for (int rank = 0; rank < size(); ++rank) {
    reports_.push_back(std::make_unique<PlanReports>(
        group_->cache(rank), [process = processes_[rank].get()](QueuedReport report) {
          process->Push(std::move(report));
        }));
  }
}

}  // namespace heavywater
