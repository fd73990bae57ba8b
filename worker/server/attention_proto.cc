#include "worker/server/attention_proto.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

constexpr int kMaxItems = 1024;
constexpr size_t kMaxNameBytes = 128;
constexpr int64_t kMaxTokens = int64_t{1} << 30;  // positions are 32-bit
constexpr size_t kPositionsPerMessage = 32768;    // with scores about half a MiB

absl::Status CheckRange(const std::string& field, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", got, ", want ", low, " to ", high));
}

absl::Status CheckName(const char* field, const std::string& value) {
  if (value.size() <= kMaxNameBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", value.size(), " bytes, want ", kMaxNameBytes, " or fewer"));
}

absl::StatusOr<EnginePhase> PhaseFromProto(const std::string& field, v1::AttentionPhase phase) {
  switch (phase) {
    case v1::PROMPT:
      return EnginePhase::kPrompt;
    case v1::PROMPT_LAST:
      return EnginePhase::kPromptLast;
    case v1::DECODE:
      return EnginePhase::kDecode;
    default:
      return absl::InvalidArgumentError(absl::StrCat(field, " is ", static_cast<int>(phase),
                                                     ", want PROMPT, PROMPT_LAST or DECODE"));
  }
}

absl::StatusOr<EngineItem> ItemFromProto(const std::string& name,
                                         const v1::BeginStep::Item& proto) {
  EngineItem item;
  item.sequence = proto.sequence_id();
  HW_ASSIGN_OR_RETURN(item.phase, PhaseFromProto(name + ".phase", proto.phase()));
  HW_RETURN_IF_ERROR(CheckRange(name + ".first_position", proto.first_position(), 0, kMaxTokens));
  HW_RETURN_IF_ERROR(CheckRange(name + ".num_tokens", proto.num_tokens(), 1, kMaxTokens));
  item.first_position = static_cast<Position>(proto.first_position());
  item.num_tokens = proto.num_tokens();
  item.note_picks = proto.note_picks();
  return item;
}

void AddSet(const ResidentSet& set, std::vector<v1::KeptResponse>& messages) {
  size_t first = 0;
  do {
    const size_t count = std::min(kPositionsPerMessage, set.positions.size() - first);
    v1::KeptSet& part = *messages.emplace_back().mutable_set();
    part.set_layer(set.layer);
    part.set_kv_head(set.kv_head);
    part.set_continued(first > 0);
    const auto positions = set.positions.begin() + static_cast<int64_t>(first);
    const auto scores = set.scores.begin() + static_cast<int64_t>(first);
    part.mutable_positions()->Add(positions, positions + static_cast<int64_t>(count));
    part.mutable_scores()->Add(scores, scores + static_cast<int64_t>(count));
    first += count;
  } while (first < set.positions.size());
}

void FillRecall(const SequenceStats& stats, v1::RecallCounts& counts) {
  counts.set_queries(stats.recall_queries);
  counts.set_reads(stats.recall_reads);
  counts.set_reads_max(stats.recall_reads_max);
  counts.set_promoted(static_cast<double>(stats.promoted));
  counts.set_mass_missing(stats.mass_missing);
  counts.set_sketch_bytes(stats.sketch_bytes);
}

}  // namespace

absl::StatusOr<std::vector<EngineItem>> EngineItemsFromProto(const v1::BeginStep& begin) {
  if (begin.items_size() > kMaxItems) {
    return absl::InvalidArgumentError(
        absl::StrCat("items has ", begin.items_size(), " entries, want at most ", kMaxItems));
  }
  std::vector<EngineItem> items;
  for (int i = 0; i < begin.items_size(); ++i) {
    HW_ASSIGN_OR_RETURN(const EngineItem item,
                        ItemFromProto(absl::StrCat("items[", i, "]"), begin.items(i)));
    items.push_back(item);
  }
  return items;
}

absl::StatusOr<SequenceOptions> SequenceFromProto(const v1::OpenAttention& open,
                                                  const std::string& default_policy) {
  HW_RETURN_IF_ERROR(CheckName("tenant", open.tenant()));
  HW_RETURN_IF_ERROR(CheckName("policy.policy", open.policy().policy()));
  HW_RETURN_IF_ERROR(CheckName("policy.scope", open.policy().scope()));
  HW_RETURN_IF_ERROR(CheckName("policy.pooling", open.policy().pooling()));
  HW_RETURN_IF_ERROR(CheckRange("prompt_tokens", open.prompt_tokens(), 1, kMaxTokens));
  HW_RETURN_IF_ERROR(CheckRange("max_tokens", open.max_tokens(), open.prompt_tokens(), kMaxTokens));
  SequenceOptions options;
  HW_ASSIGN_OR_RETURN(options.policy, PolicyFromProto(open.policy(), default_policy));
  options.prompt_tokens = open.prompt_tokens();
  options.max_tokens = open.max_tokens();
  options.prompt_in_steps = open.prompt_in_steps();
  return options;
}

absl::StatusOr<std::vector<float>> FloatsFromBytes(const char* field, const std::string& bytes) {
  if (bytes.size() % sizeof(float) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, " has ", bytes.size(), " bytes, want a multiple of ", sizeof(float), ", float32"));
  }
  std::vector<float> numbers(bytes.size() / sizeof(float));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

void FillError(const absl::Status& status, v1::AttentionError& error) {
  error.set_code(static_cast<int>(status.code()));
  error.set_message(std::string(status.message()));
}

void AddItemStatus(const absl::Status& status,
                   google::protobuf::RepeatedPtrField<v1::ItemStatus>& items) {
  v1::ItemStatus& item = *items.Add();
  item.set_code(static_cast<int>(status.code()));
  item.set_message(std::string(status.message()));
}

std::vector<v1::KeptResponse> KeptToProto(const KeptSequence& kept, const SequenceStats& stats,
                                          bool recall) {
  std::vector<v1::KeptResponse> messages(1);
  v1::KeptCounts& counts = *messages[0].mutable_counts();
  counts.set_tokens_seen(kept.report.tokens_seen);
  counts.set_tokens_resident(kept.report.tokens_resident);
  counts.set_plans(kept.report.plan_number);
  counts.set_device_bytes(stats.device_bytes);
  if (recall) FillRecall(stats, *counts.mutable_recall());
  for (const ResidentSet& set : kept.report.sets) AddSet(set, messages);
  for (const QueryPicks& query : kept.picks) {
    v1::KeptPicks& picks = *messages.emplace_back().mutable_picks();
    picks.set_layer(query.layer);
    picks.set_kv_head(query.kv_head);
    picks.set_query(query.query);
    picks.mutable_positions()->Add(query.positions.begin(), query.positions.end());
  }
  return messages;
}

}  // namespace heavywater
