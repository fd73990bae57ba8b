#include "tests/sim/rank_simulation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/sequence_memory.h"

namespace heavywater {
namespace {

constexpr Policy kPolicies[] = {Policy::kFull, Policy::kStreaming, Policy::kH2o, Policy::kSnapKv,
                                Policy::kSnapKvH2o};

}  // namespace

void SimulationCounts::Add(const SimulationCounts& other) {
  steps += other.steps;
  joined += other.joined;
  refused += other.refused;
  tokens += other.tokens;
  failed_items += other.failed_items;
  host_full_stops += other.host_full_stops;
  lost += other.lost;
  demoted_rows += other.demoted_rows;
  recalled += other.recalled;
  promoted += other.promoted;
  dropped += other.dropped;
}

RankSimulation::RankSimulation(uint32_t seed) : random_(seed) {
  const TestGroupOptions options = RandomGroup();
  group_ = std::make_unique<TestGroup>(options);
  for (int rank = 0; rank < options.world_size; ++rank) {
    idle_bytes_.push_back(group_->cache(rank).memory().reserved_bytes());
  }
}

TestGroupOptions RankSimulation::RandomGroup() {
  TestGroupOptions options;
  options.world_size = Between(1, 4);
  options.kv_heads = options.world_size == 4 ? 2 : options.world_size * Between(1, 2);
  options.query_heads = 4 * options.kv_heads * (options.world_size == 3 ? 3 : 1);
  options.num_layers = Between(1, 3);
  options.dtype = OneIn(2) ? KvDtype::kFloat32 : KvDtype::kBFloat16;
  options.head_dim = OneIn(2) ? 8 : 24;
  options.page_tokens = OneIn(3) ? 8 : 16;
  options.max_step_tokens = 24;
  options.reserve_ahead_tokens = OneIn(2) ? 0 : Between(1, 40);
  options.device_memory_bytes = OneIn(2) ? 0 : int64_t{15000} * options.head_dim;
  options.seed = random_();
  if (OneIn(8)) return options;  // no host tier
  tiers_.resize(options.world_size);
  for (FlakyHostTier& tier : tiers_) options.tiers.push_back(&tier);
  return options;
}

SequenceOptions RankSimulation::RandomSequence() {
  const int sinks = OneIn(3) ? Between(1, 4) : 0;
  SequenceOptions options =
      TestSequence(kPolicies[random_() % 5], OneIn(2) ? Scope::kLayer : Scope::kKvHead,
                   sinks + Between(1, 16), Between(1, 10), Between(1, 60), Between(1, 60));
  options.policy.sink_tokens = sinks;
  options.policy.window = Between(1, 16);
  options.policy.pooling = static_cast<Pooling>(random_() % 3);
  options.policy.plan_interval_steps = OneIn(2) ? 1 : Between(2, 6);
  options.policy.decay = OneIn(2) ? 1.0 : 0.9;
  if (OneIn(2)) AddRecall(options.policy);
  options.on_host_full = OneIn(2) ? OnHostFull::kStop : OnHostFull::kDrop;
  return options;
}

// Where the group can: it needs host tiers, and a rank's own KV heads.
void RankSimulation::AddRecall(PolicyOptions& policy) {
  const TestGroupOptions& group = group_->options();
  if (policy.policy == Policy::kFull) return;
  if (tiers_.empty() || group.world_size > group.kv_heads || group.page_tokens % 16 != 0) return;
  policy.recall.enabled = true;
  policy.recall.all = OneIn(8);
  policy.recall.recall_tokens = Between(1, 40);
  policy.recall.min_share = OneIn(2) ? 1e-4 : 1e-2;
  policy.recall.promote_candidates = Between(0, 8);
  policy.pooled_seeds = OneIn(2);
}

// As the ranks that hold the heads have it now.
PlainHostMemory RankSimulation::HostMemoryOf(SequenceId id) {
  const int heads_per_rank = group_->options().kv_heads / group_->world_size();
  return {.has_copy =
              [this, id, heads_per_rank](int kv_head, Position position) {
                const int rank = kv_head / heads_per_rank;
                return (*group_->cache(rank).Find(id))->host_pages().has_copy(position);
              },
          .promotable_end =
              [this, id] {
                int64_t end = (*group_->cache().Find(id))->host_pages().first_unbacked();
                for (int rank = 1; rank < group_->world_size(); ++rank) {
                  SequenceCache& sequence = **group_->cache(rank).Find(id);
                  end = std::min(end, sequence.host_pages().first_unbacked());
                }
                return end;
              }};
}

std::string RankSimulation::Run(int steps) {
  for (int i = 0; i < steps; ++i) {
    ++counts_.steps;
    const std::string wrong = OneRound();
    if (!wrong.empty()) return absl::StrCat("step ", i, ": ", wrong);
  }
  while (!sequences_.empty()) {
    const std::string wrong = Leave();
    if (!wrong.empty()) return wrong;
  }
  return CheckEmpty();
}

std::string RankSimulation::OneRound() {
  std::string wrong;
  if (sequences_.size() < 4 && OneIn(4)) wrong = Join();
  if (wrong.empty() && !sequences_.empty() && OneIn(15)) wrong = Leave();
  if (OneIn(5)) ChangeHostMemory();
  if (!sequences_.empty() && OneIn(40)) LoseOne();
  if (wrong.empty() && !sequences_.empty()) wrong = Step();
  return wrong.empty() ? CheckAll() : wrong;
}

std::string RankSimulation::Join() {
  const SequenceId id = next_id_++;
  Sequence sequence;
  sequence.options = RandomSequence();
  sequence.tag = static_cast<int>(id);
  if (!OneIn(4)) {  // or hardly any would be admitted
    for (FlakyHostTier& tier : tiers_) tier.reserve_status = absl::OkStatus();
  }
  const absl::Status opened = group_->Open(id, sequence.options);
  if (!opened.ok()) {
    // Ranks agree unless the host tier of one has failed.
    if (!absl::IsResourceExhausted(opened) && !absl::IsUnavailable(opened) &&
        !absl::IsInternal(opened)) {
      return opened.ToString();
    }
    ++counts_.refused;
    for (int rank = 0; rank < group_->world_size(); ++rank) {
      group_->cache(rank).Close(id).IgnoreError();
    }
    return "";
  }
  ++counts_.joined;
  const std::vector<int32_t> tokens = TestTokens(sequence.tag, sequence.options.prompt_tokens);
  sequence.plain = std::make_unique<PlainSequence>(*group_, sequence.options.policy);
  if (sequence.options.policy.recall.enabled) sequence.plain->SetHostMemory(HostMemoryOf(id));
  sequence.plain->Prompt(tokens);
  const absl::Status status = group_->RunPrompt(id, tokens);
  if (!status.ok()) return absl::StrCat("prompt of sequence ", id, ": ", status.ToString());
  sequences_[id] = std::move(sequence);
  return "";
}

std::string RankSimulation::Leave() {
  auto leaving = sequences_.begin();
  std::advance(leaving, random_() % sequences_.size());
  for (int rank = 0; rank < group_->world_size(); ++rank) {
    const SequenceStats stats = *group_->cache(rank).Stats(leaving->first);
    counts_.recalled += stats.recall_reads;
    counts_.promoted += stats.promoted;
  }
  const absl::Status status = group_->Close(leaving->first);
  sequences_.erase(leaving);
  return status.ok() ? "" : status.ToString();
}

void RankSimulation::ChangeHostMemory() {
  if (tiers_.empty()) return;
  FlakyHostTier& tier = tiers_[random_() % tiers_.size()];
  const absl::Status choices[] = {absl::OkStatus(), absl::OkStatus(),
                                  absl::ResourceExhaustedError("simulated: no room"),
                                  absl::UnavailableError("simulated: away")};
  tier.reserve_status = choices[random_() % 4];
}

// The cache service has ended a sequence that still runs.
void RankSimulation::LoseOne() {
  if (tiers_.empty()) return;
  auto lost = sequences_.begin();
  std::advance(lost, random_() % sequences_.size());
  FlakyHostTier& tier = tiers_[random_() % tiers_.size()];
  if (!tier.is_open(lost->first)) return;
  tier.Lose(lost->first);
  ++counts_.lost;
}

// Some of the sequences, one token each or some more, perhaps with a fault.
std::string RankSimulation::Step() {
  std::vector<TestAppend> appends;
  int room = group_->options().max_step_tokens;
  for (const auto& [id, sequence] : sequences_) {
    const int64_t seen = sequence.plain->tokens_seen();
    const int64_t left = sequence.options.max_tokens - seen;
    const int64_t wanted = OneIn(6) ? Between(2, 12) : 1;
    const int64_t count = std::min<int64_t>({wanted, left, room});
    if (count < 1 || OneIn(4)) continue;
    room -= static_cast<int>(count);
    appends.push_back({id, TestTokens(sequence.tag, count, seen)});
  }
  if (appends.empty()) return "";
  StepDescriptor descriptor = group_->Describe(appends);
  // A part of a longer append: no plan yet.
  for (StepItem& item : descriptor.items) {
    if (item.num_tokens > 1 && OneIn(3)) item.plan_due = false;
  }

  Fault fault = OneIn(12) ? Fault::kStatus : OneIn(12) ? Fault::kZeroScores : Fault::kNone;
  const int faulty = static_cast<int>(random_() % group_->world_size());
  if (fault != Fault::kNone) {
    group_->tamper = [&](std::vector<DeviceSpan<int64_t>>& buffers) {
      const auto world = static_cast<int64_t>(buffers.size());
      const int64_t header =
          (kStepFields + kItemFields * static_cast<int64_t>(appends.size())) * world;
      int64_t* mine = buffers[faulty].device_address();
      if (fault == Fault::kStatus) {
        for (size_t i = 0; i < appends.size(); ++i)
          mine[(kStepFields + kItemFields * i) * world + faulty] = 13;
      } else {
        std::fill_n(mine + header, buffers[faulty].size() - header, 0);
      }
    };
  }
  const absl::Status status = group_->RunStep(descriptor);
  group_->tamper = nullptr;
  if (!status.ok()) return status.ToString();
  for (size_t i = 0; i < appends.size(); ++i) {
    const std::string wrong =
        ApplyItem(descriptor.items[i], appends[i].tokens, group_->step(0).item_status()[i], fault);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

// The plain reference follows, or stays where it was.
std::string RankSimulation::ApplyItem(const StepItem& item, const std::vector<int32_t>& tokens,
                                      const absl::Status& status, Fault fault) {
  Sequence& sequence = sequences_.at(item.sequence);
  const PlainPolicy policy = PlainPolicyOf(sequence.options.policy);
  const bool scores = policy.policy == Policy::kH2o || policy.policy == Policy::kSnapKvH2o;
  const bool reduced =
      policy.scope == Scope::kLayer || group_->world_size() > group_->options().kv_heads;
  const bool must_fail = fault == Fault::kStatus ||
                         (fault == Fault::kZeroScores && scores && reduced && item.plan_due);
  const bool full = absl::IsResourceExhausted(status);
  if (full && sequence.options.on_host_full == OnHostFull::kDrop &&
      group_->options().device_memory_bytes == 0) {
    return absl::StrCat("a sequence that drops was stopped: ", status.ToString());
  }
  if (!full && status.ok() == must_fail) {
    return absl::StrCat("sequence ", item.sequence, ": status is ", status.ToString());
  }
  if (status.ok()) {
    counts_.tokens += item.num_tokens;
    sequence.plain->Append(tokens, item.plan_due);
    sequence.planned = item.plan_due;
    return "";
  }
  ++(full ? counts_.host_full_stops : counts_.failed_items);
  // A step that ran on some rank loses the gains since the last plan.
  const int64_t queries = (*group_->cache().Find(item.sequence))->queries_since_plan();
  if (queries == 0) sequence.plain->ForgetGains();
  return "";
}

}  // namespace heavywater
