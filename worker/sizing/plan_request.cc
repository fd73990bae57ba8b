#include "worker/sizing/plan_request.h"

#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/model/gguf_file.h"
#include "worker/sizing/model_presets.h"
#include "worker/sizing/request_fields.h"

namespace heavywater {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxRows = 4096;
constexpr int64_t kMaxPosition = std::numeric_limits<Position>::max();
constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
// As of a GGUF file (worker/model/model_config.cc).
constexpr int64_t kMaxSize = 1 << 24;
constexpr int64_t kMaxLayers = 1 << 10;
constexpr int64_t kMaxHeads = 1 << 12;
constexpr int64_t kMaxHeadDim = 1 << 12;

absl::StatusOr<ModelConfig> ModelOfFile(const std::string& path) {
  HW_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Open(path));
  return ReadModelConfig(*file);
}

absl::Status CheckHeads(const ModelConfig& model) {
  if (model.num_query_heads % model.num_kv_heads == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("model.num_query_heads is ", model.num_query_heads,
                                                 ", want a multiple of model.num_kv_heads, ",
                                                 model.num_kv_heads));
}

absl::StatusOr<ModelConfig> ModelOfFields(RequestFields& fields) {
  ModelConfig model;
  const std::pair<const char*, std::pair<int64_t, int*>> sizes[] = {
      {"num_layers", {kMaxLayers, &model.num_layers}},
      {"hidden_size", {kMaxSize, &model.hidden_size}},
      {"num_query_heads", {kMaxHeads, &model.num_query_heads}},
      {"num_kv_heads", {kMaxHeads, &model.num_kv_heads}},
      {"head_dim", {kMaxHeadDim, &model.head_dim}},
      {"ffn_size", {kMaxSize, &model.ffn_size}},
      {"vocab_size", {kMaxSize, &model.vocab_size}}};
  for (const auto& [name, size] : sizes) {
    HW_RETURN_IF_ERROR(fields.Require(name));
    HW_RETURN_IF_ERROR(fields.Take(name, 1, size.first, *size.second));
  }
  HW_RETURN_IF_ERROR(fields.Take("tied_embeddings", model.tied_embeddings));
  HW_RETURN_IF_ERROR(fields.Take("name", model.name));
  HW_RETURN_IF_ERROR(CheckHeads(model));
  return model;
}

absl::StatusOr<ModelConfig> ParseModel(const Json& value) {
  if (value.is_string()) return ModelPreset(value.get<std::string>());
  RequestFields fields(value, "model.");
  std::string path;
  HW_RETURN_IF_ERROR(fields.Take("gguf", path));
  auto model = path.empty() ? ModelOfFields(fields) : ModelOfFile(path);
  HW_RETURN_IF_ERROR(model.status());
  HW_RETURN_IF_ERROR(fields.Finish());
  return model;
}

absl::Status TakeBudget(RequestFields& fields, PolicyOptions& options) {
  GivenBudget given;
  HW_RETURN_IF_ERROR(fields.Take("heavy_tokens", 0, kMaxPosition, given.heavy_tokens));
  HW_RETURN_IF_ERROR(fields.Take("recent_tokens", 0, kMaxPosition, given.recent_tokens));
  HW_RETURN_IF_ERROR(fields.Take("heavy_ratio", given.heavy_ratio));
  HW_RETURN_IF_ERROR(fields.Take("recent_ratio", given.recent_ratio));
  double device_ratio = 0;
  HW_RETURN_IF_ERROR(fields.Take("device_ratio", device_ratio));
  if (fields.Has("device_ratio")) given.device_ratio = device_ratio;
  ReplaceBudget(given, options);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Json>> ListOf(const Json& request, const char* name) {
  const auto found = request.find(name);
  if (found == request.end() || !found->is_array() || found->empty()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is missing, want a list"));
  }
  return found->get<std::vector<Json>>();
}

absl::StatusOr<int64_t> ListedInteger(const Json& value, const char* name, int64_t high) {
  const Json object = {{name, value}};
  RequestFields fields(object, "");
  int64_t number = 0;
  HW_RETURN_IF_ERROR(fields.Take(name, 1, high, number));
  return number;
}

absl::Status TakeLists(const Json& json, PlanRequest& request) {
  HW_ASSIGN_OR_RETURN(const std::vector<Json> world_sizes, ListOf(json, "world_sizes"));
  for (const Json& value : world_sizes) {
    HW_ASSIGN_OR_RETURN(const int64_t size, ListedInteger(value, "world_sizes", kMaxHeads));
    request.world_sizes.push_back(static_cast<int>(size));
  }
  HW_ASSIGN_OR_RETURN(const std::vector<Json> contexts, ListOf(json, "contexts"));
  for (const Json& value : contexts) {
    HW_ASSIGN_OR_RETURN(const int64_t tokens, ListedInteger(value, "contexts", kMaxPosition));
    request.contexts.push_back(tokens);
  }
  HW_ASSIGN_OR_RETURN(const std::vector<Json> policies, ListOf(json, "policies"));
  for (const Json& value : policies) {
    HW_ASSIGN_OR_RETURN(request.policies.emplace_back(), ParsePolicyFields(value));
  }
  const auto rows = static_cast<int64_t>(world_sizes.size() * contexts.size() * policies.size());
  if (rows <= kMaxRows) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("world_sizes, contexts and policies ask for ",
                                                 rows, " rows, want at most ", kMaxRows));
}

absl::Status TakeCommon(RequestFields& fields, PlanRequest& request) {
  Deployment& common = request.common;
  HW_RETURN_IF_ERROR(fields.Take("new_tokens", 0, kMaxPosition, common.new_tokens));
  HW_RETURN_IF_ERROR(fields.Take("num_sequences", 1, kMaxInt, common.num_sequences));
  HW_RETURN_IF_ERROR(fields.Take("page_tokens", 1, kMaxInt, common.page_tokens));
  HW_RETURN_IF_ERROR(fields.Take("max_step_tokens", 1, kMaxInt, common.max_step_tokens));
  std::string dtype(KvDtypeName(common.kv_dtype));
  HW_RETURN_IF_ERROR(fields.Take("kv_dtype", dtype));
  HW_ASSIGN_OR_RETURN(common.kv_dtype, ParseKvDtype(dtype));
  HW_RETURN_IF_ERROR(fields.Take("device_bytes", 1, INT64_MAX, request.device_bytes));
  HW_RETURN_IF_ERROR(fields.Take("bandwidth_gb_s", request.bandwidth_gb_s));
  return fields.Take("host_bandwidth_gb_s", request.host_bandwidth_gb_s);
}

}  // namespace

// Whether numbers can be is ResolveBudget()'s to say.
absl::StatusOr<NamedPolicy> ParsePolicyFields(const Json& value) {
  RequestFields fields(value, "policy.");
  NamedPolicy policy{.name = "snapkv_h2o", .options = {}};
  HW_RETURN_IF_ERROR(fields.Take("policy", policy.name));
  HW_ASSIGN_OR_RETURN(PolicyOptions options, Preset(policy.name));
  std::string scope(ScopeName(options.scope));
  HW_RETURN_IF_ERROR(fields.Take("scope", scope));
  HW_ASSIGN_OR_RETURN(options.scope, ParseScope(scope));
  std::string head_budgets(HeadBudgetsName(options.head_budgets));
  HW_RETURN_IF_ERROR(fields.Take("head_budgets", head_budgets));
  HW_ASSIGN_OR_RETURN(options.head_budgets, ParseHeadBudgets(head_budgets));
  HW_RETURN_IF_ERROR(fields.Take("head_budget_floor", options.head_budget_floor));
  HW_RETURN_IF_ERROR(TakeBudget(fields, options));
  RecallOptions& recall = options.recall;
  HW_RETURN_IF_ERROR(fields.Take("sink_tokens", 0, kMaxInt, options.sink_tokens));
  HW_RETURN_IF_ERROR(fields.Take("min_budget_tokens", 0, kMaxInt, options.min_budget_tokens));
  HW_RETURN_IF_ERROR(fields.Take("plan_interval_steps", 0, kMaxInt, options.plan_interval_steps));
  HW_RETURN_IF_ERROR(fields.Take("history_window", 0, kMaxInt, options.history_window));
  HW_RETURN_IF_ERROR(fields.Take("pyramid_beta", options.pyramid_beta));
  HW_RETURN_IF_ERROR(fields.Take("exposure", options.exposure));
  HW_RETURN_IF_ERROR(fields.Take("recall", recall.enabled));
  HW_RETURN_IF_ERROR(fields.Take("recall_all", recall.all));
  HW_RETURN_IF_ERROR(fields.Take("recall_tokens", 0, kMaxInt, recall.recall_tokens));
  HW_RETURN_IF_ERROR(fields.Take("sketch_channels", 0, kMaxInt, recall.sketch_channels));
  HW_RETURN_IF_ERROR(fields.Take("promote_candidates", 0, kMaxInt, recall.promote_candidates));
  HW_RETURN_IF_ERROR(fields.Finish());
  policy.options = options;
  return policy;
}

absl::StatusOr<PlanRequest> ParsePlanRequest(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("the request is no JSON object");
  RequestFields fields(json, "");
  PlanRequest request;
  HW_RETURN_IF_ERROR(fields.Require("model"));
  HW_ASSIGN_OR_RETURN(request.common.model, ParseModel(json["model"]));
  HW_RETURN_IF_ERROR(TakeLists(json, request));
  HW_RETURN_IF_ERROR(TakeCommon(fields, request));
  fields.Know({"model", "world_sizes", "contexts", "policies"});
  HW_RETURN_IF_ERROR(fields.Finish());
  return request;
}

}  // namespace heavywater
