// A whole system on one thread, from a seed: the real registry and page store over a slab,
// tiers below and a kept state; real ranks; clients. Messages between ranks and service are
// late, overtake each other and get lost; ranks and the service end at any moment and come
// back; tiers are full or away; calls are cancelled. After every step everything that must
// hold is checked.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/system/sim_process.h"
#include "tests/sim/system/sim_service.h"
#include "tests/sim/system/sim_world.h"
#include "tests/sim/system/talk.h"
#include "tests/worker/rank/test_group.h"
#include "worker/server/plan_reports.h"

namespace heavywater {

class SystemSimulation {
 public:
  // `lines`: where each event is printed, or null.
  explicit SystemSimulation(uint64_t seed, std::FILE* lines = nullptr);
  ~SystemSimulation();

  // "" or what is wrong. Once.
  std::string Run(int steps);
  const SimTrace& trace() const { return world_.trace; }

 private:
  // --- The system --- (system_simulation.cc)
  TestGroupOptions RandomGroup();
  SimServiceOptions RandomService();
  v1::Fingerprint MakeFingerprint() const;
  std::string Round();
  std::string Act();
  void PollAll();
  std::string PassTime(absl::Duration duration);

  // --- The end --- (system_end.cc)
  std::string CleanUp();
  std::string CheckKept();
  std::string CheckMayLeave(const Talk& talk);
  std::string CheckGoesOn(Talk& talk);
  std::string CheckEmpty();

  // --- Faults --- (system_faults.cc)
  std::string Break();
  void CrashRank();
  void StandStill(SimProcess& process);
  void CrashService();
  std::string StartService();
  void CutOffRank();
  void ChangeTiers();
  void DamagePage();
  void Heal();

  // --- The group --- (system_group.cc)
  std::unique_ptr<SimProcess> NewProcess(int rank);
  void Stop();  // the ranks notice that one is gone
  void FormIfAll();
  bool formed() const { return group_ != nullptr && !stopped_; }
  int size() const { return group_options_.world_size; }
  SimProcess& rank_zero() { return *processes_[0]; }

  // --- Talks --- (system_talks.cc)
  PolicyOptions RandomPolicy(int sinks);
  PlainHostMemory HostMemoryOf(const Talk* talk);
  void NewPlain(Talk& talk);
  std::string Begin();
  std::string OpenAndPrompt(Talk& talk);
  absl::StatusOr<SequenceId> OpenAtService(Talk& talk);
  std::string Prompt(Talk& talk);
  std::string Decode();
  std::string AfterItem(Talk& talk, const StepItem& item, const std::vector<int32_t>& tokens,
                        const absl::Status& status);
  void ReportState(Talk& talk, bool with_sets, bool with_snapshot);
  void CloseOnRanks(Talk& talk);
  void CloseAtService(Talk& talk);
  Talk* AnyTalk(Talk::Where where);
  std::vector<int32_t> NextTokens(Talk& talk, int room);
  void AddRows(Talk& talk, int64_t end);
  // K and then V of one position and KV head, as it is stored.
  std::vector<std::byte> RowBytes(int layer, int kv_head, int32_t token, int64_t position) const;

  // --- Continuing them --- (system_turns.cc)
  std::string Resume(Talk& talk);
  std::string Turn(Talk& talk);
  std::string Reopen(Talk& talk, bool turn, bool cancelled);
  std::string Restore(Talk& talk, const v1::ReopenSequenceResponse& reopened, bool turn);
  absl::StatusOr<SequenceSnapshot> ReadSnapshot(SequenceId id, int64_t plan, int rank);
  absl::StatusOr<SequenceSnapshot> ReadPart(SequenceId id, int64_t plan, int rank, int part);
  void GiveBack(Talk& talk, const v1::ReopenSequenceResponse& reopened);
  std::string ComputeAnew(Talk& talk);
  void Suspend(Talk& talk);
  std::string Truncate(Talk& talk);

  // --- Checks --- (system_checks.cc)
  std::string CheckAll();
  std::string CheckRunning(Talk& talk);
  std::string CheckRank(const Talk& talk, int rank, const PlanReport& report);
  std::string CheckRows(const Talk& talk, int rank, const PlanReport& report);
  std::string CheckReference(Talk& talk, const std::vector<PlanReport>& reports);
  std::string CheckDigest(Talk& talk, const std::vector<PlanReport>& reports);
  std::string CheckMemory();
  std::string CheckTiers();
  std::string CheckAtService(Talk& talk);
  std::string CheckStoredRow(Talk& talk, int64_t committed);
  uint64_t SetsHash(const std::vector<PlanReport>& reports) const;

  SimWorld world_;
  TestGroupOptions group_options_;
  SimService service_;
  std::unique_ptr<TestGroup> rows_;  // where Q, K and V of tokens come from, and nothing else
  v1::Fingerprint fingerprint_;
  std::vector<std::unique_ptr<SimProcess>> processes_;  // [size()]
  std::vector<std::unique_ptr<SimProcess>> dead_;
  std::unique_ptr<TestGroup> group_;
  std::vector<std::unique_ptr<PlanReports>> reports_;  // [size()]
  std::vector<int64_t> idle_bytes_;                    // [size()] of a group without sequences
  Epoch formed_epoch_ = 0;
  bool stopped_ = false;  // a rank is gone, or all are about to form
  bool missing_ = false;  // some rank's process has not been started again
  bool service_starting_ = false;
  uint64_t num_instances_ = 0;
  uint64_t num_requests_ = 0;
  std::vector<std::unique_ptr<Talk>> talks_;  // numbers never come again
  int num_talks_ = 0;
  bool damaged_ = false;  // some page of a tier below
  bool faults_ = true;
  std::string wrong_;  // found where nothing can be returned
};

}  // namespace heavywater
