#include "worker/server/generation_request.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/model/chat/template.h"
#include "worker/rank/cache_places.h"
#include "worker/rank/recall_memory.h"
#include "worker/rank/stored_prefix.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

constexpr size_t kMaxNameBytes = 128;

absl::Status CheckTokens(const char* field, const google::protobuf::RepeatedField<int32_t>& tokens,
                         int vocab_size) {
  for (int i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(field, "[", i, "] is ", tokens[i],
                                                   ", want a token id in [0, ", vocab_size, ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> InField(const char* field,
                                             absl::StatusOr<std::vector<int32_t>> tokens) {
  if (tokens.ok()) return tokens;
  return absl::Status(tokens.status().code(), absl::StrCat(field, ": ", tokens.status().message()));
}

absl::Status CheckName(const char* field, const std::string& value) {
  if (value.size() <= kMaxNameBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", value.size(), " bytes, want ", kMaxNameBytes, " or fewer"));
}

absl::Status CheckNames(const v1::GenerateRequest& proto) {
  HW_RETURN_IF_ERROR(CheckName("request_id", proto.request_id()));
  HW_RETURN_IF_ERROR(CheckName("tenant", proto.tenant()));
  // Refused anyway where it is none of the known ones, but the message would
  // repeat it.
  HW_RETURN_IF_ERROR(CheckName("policy.policy", proto.policy().policy()));
  HW_RETURN_IF_ERROR(CheckName("policy.scope", proto.policy().scope()));
  HW_RETURN_IF_ERROR(CheckName("policy.positions", proto.policy().positions()));
  return CheckName("policy.pooling", proto.policy().pooling());
}

constexpr int kMaxMessages = 4096;

absl::Status CheckOnePrompt(const v1::GenerateRequest& proto) {
  const int given = !proto.text().empty() + !proto.tokens().empty() + !proto.messages().empty();
  if (given != 1) {
    return absl::InvalidArgumentError(absl::StrCat("text has ", proto.text().size(),
                                                   " bytes, tokens has ", proto.tokens_size(),
                                                   " ids and messages has ", proto.messages_size(),
                                                   " of them, want exactly one of the three"));
  }
  if (proto.messages_size() <= kMaxMessages) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("messages has ", proto.messages_size(), ", want ", kMaxMessages, " or fewer"));
}

std::string TokenText(const TokenizerSpec& spec, int32_t token) {
  const bool is_there = token >= 0 && token < static_cast<int32_t>(spec.tokens.size());
  return is_there ? spec.tokens[token] : "";
}

absl::Status BeyondThisServer(const absl::Status& why) {
  return absl::UnimplementedError(
      absl::StrCat("messages: the model's chat template is more than this server renders (send "
                   "text): ",
                   why.message()));
}

// The conversation as the model was taught to read it.
absl::StatusOr<std::string> RenderMessages(const v1::GenerateRequest& proto,
                                           const TokenizerSpec& spec) {
  if (spec.chat_template.empty()) {
    return absl::FailedPreconditionError("messages: the model has no chat template: send text");
  }
  std::vector<ChatMessage> messages;
  for (const v1::ChatMessage& message : proto.messages()) {
    messages.push_back({.role = message.role(), .content = message.content()});
  }
  const auto chat = ChatTemplate::Parse(spec.chat_template);
  if (!chat.ok()) return BeyondThisServer(chat.status());
  absl::StatusOr<std::string> text = chat->Render(messages, TokenText(spec, spec.begin_of_text),
                                                  TokenText(spec, spec.end_of_turn));
  if (text.ok()) return text;
  if (absl::IsUnimplemented(text.status())) return BeyondThisServer(text.status());
  return absl::Status(text.status().code(), absl::StrCat("messages: the model's chat template: ",
                                                         text.status().message()));
}

absl::StatusOr<std::vector<int32_t>> ParsePrompt(const v1::GenerateRequest& proto,
                                                 const GenerationLimits& limits) {
  HW_RETURN_IF_ERROR(CheckOnePrompt(proto));
  if (proto.tokens().empty()) {
    const bool has_suffix = !proto.suffix_text().empty() || !proto.suffix_tokens().empty();
    if (proto.messages().empty()) {
      return InField("text", limits.tokenizer.EncodePrompt(proto.text(), has_suffix));
    }
    HW_ASSIGN_OR_RETURN(const std::string text, RenderMessages(proto, limits.tokenizer.spec()));
    return InField("messages", limits.tokenizer.EncodePrompt(text, has_suffix));
  }
  HW_RETURN_IF_ERROR(CheckTokens("tokens", proto.tokens(), limits.vocab_size));
  return std::vector<int32_t>(proto.tokens().begin(), proto.tokens().end());
}

absl::StatusOr<int> ParseNewTokens(const v1::GenerateRequest& proto,
                                   const GenerationLimits& limits) {
  HW_RETURN_IF_ERROR(CheckTokens("forced_tokens", proto.forced_tokens(), limits.vocab_size));
  const int forced = proto.forced_tokens_size();
  if (forced == 0 && proto.max_new_tokens() < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_new_tokens is ", proto.max_new_tokens(), ", want 1 or more"));
  }
  if (forced > 0 && proto.max_new_tokens() != 0 && proto.max_new_tokens() != forced) {
    return absl::InvalidArgumentError(absl::StrCat("max_new_tokens is ", proto.max_new_tokens(),
                                                   ", want 0 or the number of forced_tokens, ",
                                                   forced));
  }
  return forced > 0 ? forced : proto.max_new_tokens();
}

absl::StatusOr<SamplerOptions> ParseSampling(const v1::Sampling& proto) {
  const float temperature = proto.temperature();
  if (!std::isfinite(temperature) || temperature < 0) {
    return absl::InvalidArgumentError(absl::StrCat("sampling.temperature is ", temperature,
                                                   ", want a finite number of 0 or more"));
  }
  const float top_p = proto.top_p() == 0 ? 1 : proto.top_p();
  if (!(top_p > 0 && top_p <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.top_p is ", top_p, ", want a number from 0 (all tokens) to 1"));
  }
  if (proto.top_k() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.top_k is ", proto.top_k(), ", want 0 (all tokens) or more"));
  }
  return SamplerOptions{
      .temperature = temperature, .top_p = top_p, .top_k = proto.top_k(), .seed = proto.seed()};
}

PrefixReuse PrefixReuseOf(const v1::GenerateRequest& proto, const GenerationLimits& limits,
                          const GenerationRequest& request) {
  const bool wanted = proto.has_prefix_reuse() ? proto.prefix_reuse() : limits.prefix_reuse;
  if (!wanted) return {.why_none = "prefix_reuse is off"};
  if (!limits.no_prefix_reuse.empty()) return {.why_none = limits.no_prefix_reuse};
  PrefixReuse reuse = {.offered = true};
  const int64_t page = limits.shape.page_tokens;
  reuse.max_tokens = MostStoredTokens(request.budget, request.sequence) / page * page;
  if (reuse.max_tokens == 0) reuse.why_none = std::string(WhyNoneStored(request.budget));
  return reuse;
}

absl::Status ParseResume(const v1::ResumePoint& proto, const GenerationLimits& limits,
                         GenerationRequest& request) {
  const int received = proto.received_tokens_size();
  if (proto.from_token() != received || received > request.max_new_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "resume.from_token is ", proto.from_token(), " and resume.received_tokens has ", received,
        " ids, want the same number, at most max_new_tokens ", request.max_new_tokens));
  }
  HW_RETURN_IF_ERROR(
      CheckTokens("resume.received_tokens", proto.received_tokens(), limits.vocab_size));
  request.resume_sequence = proto.sequence_id();
  request.received.assign(proto.received_tokens().begin(), proto.received_tokens().end());
  for (size_t i = 0; i < request.received.size() && !request.forced.empty(); ++i) {
    if (request.received[i] == request.forced[i]) continue;
    return absl::InvalidArgumentError(absl::StrCat("resume.received_tokens[", i, "] is ",
                                                   request.received[i], ", want forced_tokens[", i,
                                                   "], ", request.forced[i]));
  }
  return absl::OkStatus();
}

// At places in a bounded cache only the prompt and the cache must be within the context.
absl::Status CheckContext(const GenerationRequest& request, const GenerationLimits& limits) {
  if (request.sequence.policy.positions == Positions::kCacheRelative &&
      request.budget.bounded_decode) {
    return CheckTrainedPlaces(limits.context_tokens, limits.shape.num_layers, request.sequence,
                              request.budget);
  }
  const size_t given = request.prompt.size() + request.suffix.size();
  const int64_t all = static_cast<int64_t>(given) + request.max_new_tokens;
  if (all <= limits.context_tokens) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat("prompt of ", request.prompt.size(), " tokens, ", request.suffix.size(),
                   " appended and ", request.max_new_tokens, " new ones make ", all,
                   ", want at most the model's context of ", limits.context_tokens));
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> ParseSuffix(const v1::GenerateRequest& proto,
                                                 const GenerationLimits& limits) {
  if (!proto.suffix_text().empty() && !proto.suffix_tokens().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "suffix_text has ", proto.suffix_text().size(), " bytes and suffix_tokens has ",
        proto.suffix_tokens_size(), " ids, want at most one of the two"));
  }
  if (!proto.suffix_text().empty()) {
    return InField("suffix_text", limits.tokenizer.EncodeSuffix(proto.suffix_text()));
  }
  HW_RETURN_IF_ERROR(CheckTokens("suffix_tokens", proto.suffix_tokens(), limits.vocab_size));
  return std::vector<int32_t>(proto.suffix_tokens().begin(), proto.suffix_tokens().end());
}

absl::StatusOr<GenerationRequest> ParseGenerateRequest(const v1::GenerateRequest& proto,
                                                       const GenerationLimits& limits) {
  GenerationRequest request;
  HW_RETURN_IF_ERROR(CheckNames(proto));
  HW_ASSIGN_OR_RETURN(request.prompt, ParsePrompt(proto, limits));
  HW_ASSIGN_OR_RETURN(request.suffix, ParseSuffix(proto, limits));
  HW_ASSIGN_OR_RETURN(request.max_new_tokens, ParseNewTokens(proto, limits));
  HW_ASSIGN_OR_RETURN(request.sampling, ParseSampling(proto.sampling()));
  HW_ASSIGN_OR_RETURN(request.sequence.policy,
                      PolicyFromProto(proto.policy(), limits.default_policy));
  if (proto.return_reads() && !request.sequence.policy.recall.enabled) {
    return absl::InvalidArgumentError(
        "return_reads is true without recall, want policy.recall true or return_reads false");
  }
  request.sequence.prompt_tokens = static_cast<int64_t>(request.prompt.size());
  // The last new token is given out, not taken in.
  request.sequence.max_tokens = request.sequence.prompt_tokens +
                                static_cast<int64_t>(request.suffix.size()) +
                                request.max_new_tokens - 1;
  request.sequence.on_host_full = limits.on_host_full;
  HW_ASSIGN_OR_RETURN(request.budget, ResolveSequenceBudget(limits.shape, request.sequence));
  HW_RETURN_IF_ERROR(CheckContext(request, limits));
  request.prefix = PrefixReuseOf(proto, limits, request);
  request.forced.assign(proto.forced_tokens().begin(), proto.forced_tokens().end());
  HW_RETURN_IF_ERROR(ParseResume(proto.resume(), limits, request));
  request.is_back = proto.has_resume();
  request.ignore_eos = proto.ignore_eos();
  request.return_logits = proto.return_logits();
  request.return_reads = proto.return_reads();
  request.request_id = proto.request_id();
  if (!proto.tenant().empty()) request.tenant = proto.tenant();
  return request;
}

}  // namespace heavywater
