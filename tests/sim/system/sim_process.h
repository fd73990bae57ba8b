// One process of a rank, as far as the cache service sees it: its membership, its pages,
// its reports on their way. What it computes is the group's (SystemSimulation).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/sim/system/sim_host_tier.h"
#include "tests/sim/system/sim_link.h"
#include "worker/server/report_queue.h"

namespace heavywater {

class SimProcess {
 public:
  SimProcess(SimWorld& world, SimService& service, SimLinkOptions options,
             int64_t reserve_ahead_tokens);

  SimLink& link() { return link_; }
  SimHostTier& tier() { return tier_; }
  SimCaller& caller() { return *caller_; }
  void Push(QueuedReport report) { queue_.Push(std::move(report)); }
  // What its threads do, some of it.
  void Poll();
  // Killed: what it has sent still arrives.
  void Kill();
  size_t queued_reports() const { return queue_.size(); }
  // "" or why the service has refused a report, which it never may.
  const std::string& wrong() const { return wrong_; }

 private:
  void Send(std::vector<v1::PlanReport> parts, size_t next, size_t batch);
  void Sent(const absl::Status& status, std::vector<v1::PlanReport> parts, size_t next,
            size_t batch);

  SimWorld& world_;
  SimService& service_;
  const SimCallerPtr caller_;
  SimLink link_;
  SimHostTier tier_;
  ReportQueue queue_;
  bool sending_ = false;
  absl::Time next_try_ = absl::InfinitePast();
  std::string wrong_;
};

}  // namespace heavywater
