#include "worker/server/turn_request.h"

#include <google/protobuf/util/message_differencer.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cache_service/base/status.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

// As this build writes it: an earlier one did not know all fields.
v1::PolicyOptions Completed(const v1::PolicyOptions& stored) {
  const absl::StatusOr<PolicyOptions> options = PolicyFromProto(stored);
  return options.ok() ? PolicyToProto(*options) : stored;
}

absl::Status CheckPolicy(const v1::PolicyOptions& got, const v1::Sequence& known) {
  std::string differences;
  google::protobuf::util::MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&differences);
  if (differencer.Compare(Completed(known.policy()), got)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("policy is not that of sequence ", known.sequence_id(), " (",
                   absl::StripSuffix(differences, "\n"), "), want the same or none"));
}

}  // namespace

absl::Status CheckTurn(const v1::GenerateRequest& proto) {
  if (proto.text().empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("text has ", proto.text().size(),
                   " bytes beside continue_sequence_id, want the text so far in tokens"));
}

absl::StatusOr<GenerationRequest> ParseTurn(const v1::GenerateRequest& proto,
                                            const v1::Sequence& known,
                                            const GenerationLimits& limits) {
  const int64_t prompt = known.prompt_tokens();
  const bool has_more = !proto.suffix_text().empty() || proto.suffix_tokens_size() > 0 ||
                        proto.has_resume() || proto.tokens_size() > prompt;
  if (proto.tokens_size() < prompt || !has_more) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens has ", proto.tokens_size(), " ids, want the whole text of sequence ",
                     known.sequence_id(), " and more: its prompt alone has ", prompt));
  }
  v1::GenerateRequest split = proto;
  const int32_t* const begin = proto.tokens().data();
  split.mutable_tokens()->Assign(begin, begin + prompt);
  std::vector<int32_t> rest(begin + prompt, begin + proto.tokens_size());
  HW_ASSIGN_OR_RETURN(const std::vector<int32_t> suffix, ParseSuffix(proto, limits));
  rest.insert(rest.end(), suffix.begin(), suffix.end());
  split.clear_suffix_text();
  split.mutable_suffix_tokens()->Assign(rest.begin(), rest.end());
  if (!proto.has_policy()) *split.mutable_policy() = known.policy();
  HW_ASSIGN_OR_RETURN(GenerationRequest request, ParseGenerateRequest(split, limits));
  if (!proto.has_resume()) {
    HW_RETURN_IF_ERROR(CheckPolicy(PolicyToProto(request.sequence.policy), known));
    request.resume_sequence = known.sequence_id();
  }
  request.turn = true;
  return request;
}

}  // namespace heavywater
