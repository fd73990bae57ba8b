#include "worker/replay/replay_json.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/cache/kv_layout.h"
#include "worker/replay/replay.h"
#include "worker/replay/trace_file.h"
#include "worker/sizing/plan_request.h"
#include "worker/sizing/request_fields.h"

namespace heavywater {
namespace {

using Json = nlohmann::json;

struct ReplayRequest {
  std::string trace;
  std::vector<NamedPolicy> policies;
  ReplayOptions options;
};

absl::StatusOr<ReplayRequest> Parse(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("the request is no JSON object");
  RequestFields fields(json, "");
  fields.Know({"policies"});
  ReplayRequest request;
  HW_RETURN_IF_ERROR(fields.Require("trace"));
  HW_RETURN_IF_ERROR(fields.Require("policies"));
  HW_RETURN_IF_ERROR(fields.Take("trace", request.trace));
  HW_RETURN_IF_ERROR(fields.Take("num_threads", 1, 256, request.options.num_threads));
  HW_RETURN_IF_ERROR(fields.Take("page_tokens", 16, 1 << 16, request.options.page_tokens));
  HW_RETURN_IF_ERROR(fields.Finish());
  const Json& policies = json.at("policies");
  if (!policies.is_array() || policies.empty()) {
    return absl::InvalidArgumentError("policies is no list of one or more, want one");
  }
  for (const Json& value : policies) {
    HW_ASSIGN_OR_RETURN(NamedPolicy policy, ParsePolicyFields(value));
    request.policies.push_back(std::move(policy));
  }
  return request;
}

Json RowOf(const NamedPolicy& policy, const ReplayFigures& figures) {
  return {{"policy", policy.name},
          {"scope", std::string(ScopeName(policy.options.scope))},
          {"recall", policy.options.recall.enabled},
          {"queries", figures.queries},
          {"mass_kept", figures.mass_kept},
          {"error", figures.error},
          {"agreement", figures.agreement},
          {"resident_tokens", figures.tokens_resident},
          {"device_bytes", figures.device_bytes},
          {"bytes_ratio", static_cast<double>(figures.device_bytes) /
                              static_cast<double>(figures.full_cache_bytes)}};
}

}  // namespace

absl::StatusOr<Json> AnswerReplayRequest(const std::string& text) {
  HW_ASSIGN_OR_RETURN(const ReplayRequest request, Parse(text));
  HW_ASSIGN_OR_RETURN(const Trace trace, ReadTrace(request.trace));
  Json rows = Json::array();
  for (const NamedPolicy& policy : request.policies) {
    const absl::StatusOr<ReplayFigures> figures = Replay(trace, policy.options, request.options);
    if (!figures.ok()) {
      return absl::Status(figures.status().code(),
                          absl::StrCat("policy ", policy.name, ": ", figures.status().message()));
    }
    rows.push_back(RowOf(policy, *figures));
  }
  const TraceShape& shape = trace.shape;
  return Json{{"trace",
               {{"num_layers", shape.num_layers},
                {"num_query_heads", shape.num_query_heads},
                {"num_kv_heads", shape.num_kv_heads},
                {"head_dim", shape.head_dim},
                {"num_tokens", shape.num_tokens},
                {"prompt_tokens", shape.prompt_tokens},
                {"dtype", std::string(KvDtypeName(shape.dtype))},
                {"model", shape.model}}},
              {"rows", rows}};
}

}  // namespace heavywater
