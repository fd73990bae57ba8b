#include "tests/sim/system/system_simulation.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"

namespace heavywater {
namespace {

// Rows are asked for again by every rank, step and reference.
RowSource Remembering(RowSource rows) {
  using Key = std::tuple<int, int32_t, Position>;
  auto known = std::make_shared<std::map<Key, SyntheticRow>>();
  return [rows = std::move(rows), known](int layer, int32_t token, Position position) {
    const auto [row, added] = known->try_emplace(Key(layer, token, position));
    if (added) row->second = rows(layer, token, position);
    return row->second;
  };
}

}  // namespace

SystemSimulation::SystemSimulation(uint64_t seed, std::FILE* lines)
    : world_(seed), group_options_(RandomGroup()), service_(world_, RandomService()) {
  world_.trace.PrintTo(lines, &world_.clock);
  world_.network.SetLoss(world_.OneIn(4) ? 0 : world_.Between(30, 200));
  TestGroupOptions rows = group_options_;
  group_options_.rows =
      Remembering([shape = TestShape(rows, 0), seed](int layer, int32_t token, Position position) {
        return MakeSyntheticRow(shape, seed, layer, token, position);
      });
  rows.rows = group_options_.rows;
  rows_ = std::make_unique<TestGroup>(rows);
  for (int rank = 0; rank < size(); ++rank) {
    idle_bytes_.push_back(rows_->cache(rank).memory().reserved_bytes());
  }
  fingerprint_ = MakeFingerprint();
}

// The group closes its sequences while the processes' tiers live.
SystemSimulation::~SystemSimulation() {
  for (const auto& process : processes_) process->Kill();
  group_.reset();
}

TestGroupOptions SystemSimulation::RandomGroup() {
  TestGroupOptions options;
  options.world_size = world_.Between(1, 3);
  options.kv_heads = options.world_size * world_.Between(1, 2);
  if (options.world_size == 2 && world_.OneIn(6)) options.kv_heads = 1;
  options.query_heads = std::max(options.kv_heads, options.world_size) * world_.Between(1, 2);
  options.num_layers = world_.Between(1, 2);
  options.dtype = world_.OneIn(2) ? KvDtype::kFloat32 : KvDtype::kBFloat16;
  options.head_dim = 8;
  options.page_tokens = world_.OneIn(4) ? 8 : 16;
  options.max_step_tokens = 24;
  options.reserve_ahead_tokens = world_.OneIn(3) ? 0 : world_.Between(1, 40);
  options.device_memory_bytes = world_.OneIn(4) ? int64_t{200'000} : 0;
  options.seed = world_.random();
  return options;
}

SimServiceOptions SystemSimulation::RandomService() {
  const int64_t page = int64_t{4096};
  const int heads = group_options_.num_layers * group_options_.kv_heads;
  SimServiceOptions options;
  options.host_bytes = page * heads * (world_.OneIn(2) ? 60 : world_.Between(12, 30));
  // As they are stored: the pages themselves are small.
  const int64_t stored = group_options_.page_tokens * int64_t{64} + 52;
  if (!world_.OneIn(4)) options.disk_bytes = stored * heads * world_.Between(10, 60);
  if (options.disk_bytes > 0 && world_.OneIn(2)) {
    options.remote_bytes = stored * heads * world_.Between(10, 60);
  }
  options.maps_slab = !world_.OneIn(6);
  options.registry.max_sequences = world_.OneIn(4) ? 6 : 100;
  options.registry.rank_lease = absl::Seconds(2);
  options.registry.sequence_lease = absl::Seconds(world_.Between(4, 12));
  options.registry.suspend_ttl = absl::Seconds(30);
  options.registry.max_suspended_bytes = options.host_bytes / 2;
  return options;
}

v1::Fingerprint SystemSimulation::MakeFingerprint() const {
  v1::Fingerprint fingerprint;
  fingerprint.set_model("simulated");
  fingerprint.set_dtype(group_options_.dtype == KvDtype::kFloat32 ? "fp32" : "bf16");
  fingerprint.set_num_layers(group_options_.num_layers);
  fingerprint.set_num_kv_heads(group_options_.kv_heads);
  fingerprint.set_head_dim(group_options_.head_dim);
  fingerprint.set_rope("none");
  fingerprint.set_positions("absolute");
  fingerprint.set_page_tokens(group_options_.page_tokens);
  fingerprint.set_format_version(1);
  return fingerprint;
}

std::string SystemSimulation::Run(int steps) {
  if (std::string wrong = StartService(); !wrong.empty()) return wrong;
  for (int rank = 0; rank < size(); ++rank) {
    processes_.push_back(NewProcess(rank));
    processes_.back()->link().Join(0);
  }
  for (int i = 0; i < steps; ++i) {
    const std::string wrong = Round();
    if (!wrong.empty()) return absl::StrCat("step ", i, ": ", wrong);
  }
  return CleanUp();
}

std::string SystemSimulation::Round() {
  const int chance = world_.Between(0, 99);
  // Nothing happens on ranks that wait for each other.
  std::string wrong = PassTime(!formed()     ? world_.Millis(50, 600)
                               : chance < 85 ? world_.Millis(1, 40)
                               : chance < 97 ? world_.Millis(40, 400)
                                             : world_.Millis(400, 4000));
  if (wrong.empty()) wrong = Break();
  if (wrong.empty()) wrong = Act();
  if (wrong.empty() && formed()) wrong = Decode();
  return wrong.empty() ? CheckAll() : wrong;
}

// One thing that a client does, now and then.
std::string SystemSimulation::Act() {
  if (!formed()) return "";
  const auto living = std::count_if(talks_.begin(), talks_.end(), [](const auto& talk) {
    return talk->where != Talk::Where::kGone;
  });
  if (living < 6 && world_.OneIn(5)) return Begin();
  if (Talk* const talk = AnyTalk(Talk::Where::kCutOff); talk != nullptr && world_.OneIn(3)) {
    return Resume(*talk);
  }
  Talk* const running = AnyTalk(Talk::Where::kRunning);
  Talk* const ended = AnyTalk(Talk::Where::kEnded);
  switch (world_.Between(0, 24)) {
    case 0:
    case 1:  // it has finished, or its client has left
      if (running == nullptr) return "";
      world_.trace.Note("end", running->id);
      CloseOnRanks(*running);
      return "";
    case 2:
      if (running != nullptr) Suspend(*running);
      return "";
    case 3:
      if (ended != nullptr) Suspend(*ended);
      return "";
    case 4:
    case 5:
    case 6:
      return ended == nullptr ? "" : Turn(*ended);
    case 7:
      return ended == nullptr ? "" : Truncate(*ended);
    case 8:
      if (ended != nullptr) CloseAtService(*ended);
      return "";
    case 9:  // whoever it was: also one that runs
      if (running != nullptr && world_.OneIn(4)) CloseAtService(*running);
      return "";
    default:
      return "";
  }
}

void SystemSimulation::PollAll() {
  for (const auto& process : processes_) {
    if (process->caller().alive && world_.OneIn(2)) process->Poll();
  }
  if (world_.OneIn(2)) service_.Background(world_.Between(1, 3));
}

std::string SystemSimulation::PassTime(absl::Duration duration) {
  PollAll();
  world_.network.RunFor(duration);
  FormIfAll();
  for (const auto& process : processes_) {
    if (wrong_.empty()) wrong_ = process->wrong();
  }
  return wrong_;
}

}  // namespace heavywater
