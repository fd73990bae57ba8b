// Sequences from their beginning to their end on the ranks.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/bfloat16.h"
#include "tests/sim/system/system_simulation.h"
#include "worker/rank/sequence_cache.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

constexpr Policy kPolicies[] = {Policy::kFull, Policy::kStreaming, Policy::kH2o, Policy::kSnapKv,
                                Policy::kSnapKvH2o};
constexpr int kStatusFault = 13;

void AppendStored(std::span<const float> values, KvDtype dtype, std::vector<std::byte>& bytes) {
  for (const float value : values) {
    const uint16_t rounded = FloatToBFloat16(value);
    const auto* from = dtype == KvDtype::kFloat32 ? reinterpret_cast<const std::byte*>(&value)
                                                  : reinterpret_cast<const std::byte*>(&rounded);
    bytes.insert(bytes.end(), from, from + ElementBytes(dtype));
  }
}

}  // namespace

PolicyOptions SystemSimulation::RandomPolicy(int sinks) {
  SequenceOptions options = TestSequence(kPolicies[world_.Between(0, 4)],
                                         world_.OneIn(2) ? Scope::kLayer : Scope::kKvHead,
                                         sinks + world_.Between(1, 12), world_.Between(1, 8), 1);
  PolicyOptions& policy = options.policy;
  policy.sink_tokens = sinks;
  policy.window = world_.Between(1, 8);
  policy.pooling = static_cast<Pooling>(world_.Between(0, 2));
  policy.plan_interval_steps = world_.OneIn(2) ? 1 : world_.Between(2, 6);
  policy.decay = world_.OneIn(2) ? 1.0 : 0.9;
  const bool can_recall = policy.policy != Policy::kFull && size() <= group_options_.kv_heads &&
                          group_options_.page_tokens % 16 == 0;
  if (!can_recall || world_.OneIn(2)) return policy;
  policy.recall.enabled = true;
  policy.recall.all = world_.OneIn(8);
  policy.recall.recall_tokens = world_.Between(1, 20);
  policy.recall.promote_candidates = world_.Between(0, 8);
  policy.pooled_seeds = world_.OneIn(2);
  return policy;
}

// As the ranks that hold the heads have it now.
PlainHostMemory SystemSimulation::HostMemoryOf(const Talk* talk) {
  const int heads_per_rank = std::max(1, group_options_.kv_heads / size());
  return {.has_copy =
              [this, talk, heads_per_rank](int kv_head, Position position) {
                SequenceCache& sequence = **group_->cache(kv_head / heads_per_rank).Find(talk->id);
                return sequence.host_pages().has_copy(position);
              },
          .promotable_end =
              [this, talk] {
                int64_t end = (*group_->cache(0).Find(talk->id))->host_pages().first_unbacked();
                for (int rank = 1; rank < size(); ++rank) {
                  SequenceCache& sequence = **group_->cache(rank).Find(talk->id);
                  end = std::min(end, sequence.host_pages().first_unbacked());
                }
                return end;
              }};
}

void SystemSimulation::NewPlain(Talk& talk) {
  talk.plain = std::make_unique<PlainSequence>(*rows_, talk.options.policy);
  if (talk.options.policy.recall.enabled) talk.plain->SetHostMemory(HostMemoryOf(&talk));
}

std::string SystemSimulation::Begin() {
  auto talk = std::make_unique<Talk>();
  talk->number = num_talks_++;
  talk->options.policy = RandomPolicy(world_.OneIn(3) ? world_.Between(1, 3) : 0);
  talk->options.prompt_tokens = world_.Between(1, 40);
  talk->options.max_tokens = talk->options.prompt_tokens + world_.Between(1, 60);
  talk->options.on_host_full = world_.OneIn(2) ? OnHostFull::kStop : OnHostFull::kDrop;
  for (int64_t i = 0; i < talk->options.prompt_tokens; ++i) {
    talk->text.push_back(talk->TokenAt(i));
  }
  const auto budget =
      ResolveBudget(talk->options.policy, talk->options.prompt_tokens, group_options_.num_layers);
  if (!budget.ok()) return absl::StrCat("budget: ", budget.status().ToString());
  talk->budget = *budget;
  talk->where = Talk::Where::kGone;
  std::string wrong = OpenAndPrompt(*talk);
  talks_.push_back(std::move(talk));
  return wrong;
}

absl::StatusOr<SequenceId> SystemSimulation::OpenAtService(Talk& talk) {
  v1::OpenSequenceRequest request;
  request.set_request_id(absl::StrCat("request-", ++num_requests_));
  request.set_group(kSimGroup);
  request.set_epoch(rank_zero().link().epoch());
  *request.mutable_fingerprint() = fingerprint_;
  *request.mutable_policy() = PolicyToProto(talk.options.policy);
  *request.mutable_budget() = BudgetToProto(talk.options.policy, talk.budget);
  request.set_prompt_tokens(talk.options.prompt_tokens);
  request.set_max_tokens(talk.options.max_tokens);
  request.set_tenant("tenant");
  const absl::Time sent = world_.clock.Now();
  const auto open = [&] {
    return world_.network.CallNow<v1::OpenSequenceResponse>(
        rank_zero().caller(), [&] { return service_.registry().Open(request); });
  };
  auto opened = open();
  if (absl::IsUnavailable(opened.status())) opened = open();  // the answer to the first, perhaps
  if (!opened.ok()) return opened.status();
  rank_zero().link().AddSequence(opened->sequence_id(), sent);
  talk.lease = absl::Milliseconds(opened->lease_ms());
  return opened->sequence_id();
}

std::string SystemSimulation::OpenAndPrompt(Talk& talk) {
  const auto id = OpenAtService(talk);
  if (!id.ok()) {
    world_.trace.Note(absl::StrCat("open: ", absl::StatusCodeToString(id.status().code())));
    // NOT_FOUND: the leases of all ranks had ended, and not all have joined again.
    const bool expected = absl::IsUnavailable(id.status()) || absl::IsAborted(id.status()) ||
                          absl::IsNotFound(id.status()) || absl::IsResourceExhausted(id.status());
    return expected ? "" : absl::StrCat("open: ", id.status().ToString());
  }
  talk.id = *id;
  talk.tokens_seen = 0;
  talk.whole = true;
  talk.ForgetStates();
  world_.trace.Note("open", talk.id);
  std::vector<bool> open(size());
  bool all = true;
  for (int rank = 0; rank < size(); ++rank) {
    processes_[rank]->tier().Expect(talk.id, talk.options.max_tokens, talk.lease);
    open[rank] = group_->cache(rank).Open(talk.id, talk.options).ok();
    if (!open[rank]) processes_[rank]->tier().Forget(talk.id);
    all = all && open[rank];
  }
  // Now and then its client leaves before its prompt.
  if (all && !world_.OneIn(20)) return Prompt(talk);
  world_.trace.Note(all ? "cancelled before its prompt" : "refused by a rank", talk.id);
  for (int rank = 0; rank < size(); ++rank) {
    if (open[rank]) group_->cache(rank).Close(talk.id).IgnoreError();
  }
  rank_zero().link().RemoveSequence(talk.id);
  CloseAtService(talk);
  return "";
}

std::string SystemSimulation::Prompt(Talk& talk) {
  talk.where = Talk::Where::kRunning;
  const int64_t prompt = talk.options.prompt_tokens;
  const std::vector<int32_t> tokens(talk.text.begin(), talk.text.begin() + prompt);
  NewPlain(talk);
  talk.plain->Prompt(tokens);
  const absl::Status status = group_->RunPrompt(talk.id, tokens);
  if (!status.ok()) return absl::StrCat("prompt of ", talk.id, ": ", status.ToString());
  talk.tokens_seen = prompt;
  talk.fresh = true;
  AddRows(talk, prompt);
  for (const auto& reports : reports_) reports->AddTokens(talk.id, 0, tokens);
  ReportState(talk, /*with_sets=*/true, /*with_snapshot=*/true);
  return "";
}

std::vector<std::byte> SystemSimulation::RowBytes(int layer, int kv_head, int32_t token,
                                                  int64_t position) const {
  const SyntheticRow row = rows_->Rows(layer, {token}, static_cast<Position>(position));
  const auto width = static_cast<size_t>(group_options_.head_dim);
  std::vector<std::byte> bytes;
  for (const std::vector<float>* half : {&row.k, &row.v}) {
    AppendStored(std::span(*half).subspan(static_cast<size_t>(kv_head) * width, width),
                 group_options_.dtype, bytes);
  }
  return bytes;
}

void SystemSimulation::AddRows(Talk& talk, int64_t end) {
  const auto heads = static_cast<size_t>(group_options_.kv_heads);
  const size_t row_bytes = TestShape(group_options_, 0).row_bytes();
  talk.rows.resize(static_cast<size_t>(group_options_.num_layers) * heads);
  for (size_t i = 0; i < talk.rows.size(); ++i) {
    std::vector<std::byte>& rows = talk.rows[i];
    for (auto position = rows.size() / row_bytes; position < static_cast<size_t>(end); ++position) {
      const std::vector<std::byte> row =
          RowBytes(static_cast<int>(i / heads), static_cast<int>(i % heads), talk.text[position],
                   static_cast<int64_t>(position));
      rows.insert(rows.end(), row.begin(), row.end());
    }
  }
}

Talk* SystemSimulation::AnyTalk(Talk::Where where) {
  std::vector<Talk*> all;
  for (const auto& talk : talks_) {
    if (talk->where == where) all.push_back(talk.get());
  }
  return all.empty() ? nullptr : all[world_.random() % all.size()];
}

// What is to be taken in again comes in the steps in which it came first, mostly: then the
// state is the same, bit for bit.
std::vector<int32_t> SystemSimulation::NextTokens(Talk& talk, int room) {
  const auto known = static_cast<int64_t>(talk.text.size());
  int64_t count = world_.OneIn(6) ? world_.Between(2, 10) : 1;
  const auto next = talk.digests.upper_bound(talk.tokens_seen);
  if (next != talk.digests.end()) {
    if (!world_.OneIn(8) && next->first - talk.tokens_seen <= room) {
      count = next->first - talk.tokens_seen;
    } else {
      talk.digests.erase(next, talk.digests.end());  // otherwise from here on
    }
  }
  count = std::min({count, int64_t{room}, talk.options.max_tokens - talk.tokens_seen});
  if (talk.tokens_seen < known) count = std::min(count, known - talk.tokens_seen);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = talk.tokens_seen + i;
    tokens.push_back(position < known ? talk.text[static_cast<size_t>(position)]
                                      : talk.TokenAt(position));
  }
  return tokens;
}

// A step of some of those that run.
std::string SystemSimulation::Decode() {
  std::vector<TestAppend> appends;
  std::vector<Talk*> stepped;
  int room = group_options_.max_step_tokens;
  for (const auto& talk : talks_) {
    if (talk->where != Talk::Where::kRunning || room == 0 || world_.OneIn(4)) continue;
    const std::vector<int32_t> tokens = NextTokens(*talk, room);
    if (tokens.empty()) {
      CloseOnRanks(*talk);  // it has all that it may have
      continue;
    }
    room -= static_cast<int>(tokens.size());
    appends.push_back({talk->id, tokens});
    stepped.push_back(talk.get());
  }
  if (appends.empty()) return "";
  const StepDescriptor descriptor = group_->Describe(appends);
  const bool faulty = faults_ && world_.OneIn(60);
  if (faulty) {
    const auto rank = static_cast<int64_t>(world_.Between(0, size() - 1));
    group_->tamper = [&, rank](std::vector<DeviceSpan<int64_t>>& buffers) {
      const auto world = static_cast<int64_t>(buffers.size());
      int64_t* const mine = buffers[static_cast<size_t>(rank)].device_address();
      for (size_t i = 0; i < appends.size(); ++i) {
        mine[(kStepFields + kItemFields * static_cast<int64_t>(i)) * world + rank] = kStatusFault;
      }
    };
  }
  const absl::Status status = group_->RunStep(descriptor);
  group_->tamper = nullptr;
  if (!status.ok()) return absl::StrCat("step: ", status.ToString());
  for (size_t i = 0; i < appends.size(); ++i) {
    const absl::Status& item = group_->step(0).item_status()[i];
    if (faulty && item.ok()) return "an item did not fail although a rank said so";
    const std::string wrong = AfterItem(*stepped[i], descriptor.items[i], appends[i].tokens, item);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string SystemSimulation::AfterItem(Talk& talk, const StepItem& item,
                                        const std::vector<int32_t>& tokens,
                                        const absl::Status& status) {
  if (!status.ok()) {
    const bool drops = talk.options.on_host_full == OnHostFull::kDrop;
    if (absl::IsResourceExhausted(status) && drops && group_options_.device_memory_bytes == 0) {
      return absl::StrCat("a sequence that drops was stopped: ", status.ToString());
    }
    world_.trace.Note(absl::StrCat("item: ", absl::StatusCodeToString(status.code())), talk.id);
    // Gains since its last plan are lost: what the same steps would give again is not this.
    talk.digests.erase(talk.digests.upper_bound(talk.tokens_seen), talk.digests.end());
    CloseOnRanks(talk);
    return "";
  }
  const int64_t first = talk.tokens_seen;
  talk.tokens_seen += static_cast<int64_t>(tokens.size());
  for (auto i = static_cast<int64_t>(talk.text.size()) - first;
       i < static_cast<int64_t>(tokens.size()); ++i) {
    talk.text.push_back(tokens[static_cast<size_t>(i)]);
  }
  AddRows(talk, talk.tokens_seen);
  if (talk.plain != nullptr) talk.plain->Append(tokens, item.plan_due);
  talk.fresh = true;
  world_.trace.Note("tokens", talk.id, static_cast<uint64_t>(talk.tokens_seen));
  for (const auto& reports : reports_) {
    reports->AddTokens(talk.id, static_cast<Position>(first), tokens);
  }
  const SequenceStats stats = *group_->cache().Stats(talk.id);
  const bool at_any_step = !stats.budget.bounded_decode && !stats.budget.uses_scores &&
                           !talk.options.policy.recall.enabled;
  const bool snapshot = (item.plan_due || at_any_step) && world_.OneIn(4);
  if (item.plan_due || snapshot) ReportState(talk, item.plan_due && world_.OneIn(3), snapshot);
  return "";
}

void SystemSimulation::ReportState(Talk& talk, bool with_sets, bool with_snapshot) {
  bool can = with_snapshot;
  for (int rank = 0; rank < size(); ++rank) {
    can = can && (*group_->cache(rank).Find(talk.id))->CanSnapshot();
  }
  int64_t plan = 0;
  std::vector<PlanReport> sets;
  for (int rank = 0; rank < size(); ++rank) {
    const auto reported = reports_[rank]->Report(talk.id, with_sets, with_snapshot);
    if (!reported.ok()) wrong_ = absl::StrCat("report: ", reported.status().ToString());
    if (reported.ok() && rank > 0 && *reported != plan) wrong_ = "ranks number plans differently";
    if (reported.ok()) plan = *reported;
    if (!with_sets) continue;
    sets.push_back(*group_->cache(rank).Report(talk.id, /*with_sets=*/true));
    talk.whole = talk.whole && sets.back().unbacked.empty();
  }
  if (with_sets) talk.sets_of_plan[plan] = SetsHash(sets);
  if (!can) return;
  TalkState& state = talk.states[plan];
  state.tokens_seen = talk.tokens_seen;
  state.text_hash = talk.TextHash(talk.tokens_seen);
  if (talk.plain != nullptr) state.plain = std::make_unique<PlainSequence>(*talk.plain);
}

// Its Generate ends, for whatever reason: each rank says so once all its rows are written.
void SystemSimulation::CloseOnRanks(Talk& talk) {
  ReportState(talk, /*with_sets=*/true, /*with_snapshot=*/false);
  for (int rank = 0; rank < size(); ++rank) {
    const absl::Status closed = group_->cache(rank).Close(talk.id);
    if (!closed.ok()) wrong_ = absl::StrCat("close: ", closed.ToString());
    processes_[rank]->tier().WhenWritten(talk.id, reports_[rank]->Close(talk.id));
  }
  rank_zero().link().RemoveSequence(talk.id);
  talk.where = Talk::Where::kEnded;
  talk.turn = false;
  world_.trace.Note("ended", talk.id, static_cast<uint64_t>(talk.tokens_seen));
}

// The client's or an operator's call. Ranks that have it hear of that with a heartbeat.
void SystemSimulation::CloseAtService(Talk& talk) {
  v1::CloseSequenceRequest request;
  request.set_sequence_id(talk.id);
  request.set_request_id(absl::StrCat("close-", ++num_requests_));
  const auto closed = world_.network.CallNow<bool>(SimCaller(), [&]() -> absl::StatusOr<bool> {
    const absl::Status status = service_.sequences().Close(request);
    if (!status.ok()) return status;
    return true;
  });
  world_.trace.Note(absl::StrCat("close: ", absl::StatusCodeToString(closed.status().code())),
                    talk.id);
  talk.whole = false;
  if (talk.where != Talk::Where::kRunning) talk.where = Talk::Where::kGone;
}

}  // namespace heavywater
