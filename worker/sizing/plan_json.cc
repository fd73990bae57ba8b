#include "worker/sizing/plan_json.h"

#include <string>

#include "cache_service/base/status.h"

namespace heavywater {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kGiga = 1e9;

Json ModelJson(const ModelConfig& model) {
  return {{"name", model.name},
          {"num_layers", model.num_layers},
          {"hidden_size", model.hidden_size},
          {"num_query_heads", model.num_query_heads},
          {"num_kv_heads", model.num_kv_heads},
          {"head_dim", model.head_dim},
          {"ffn_size", model.ffn_size},
          {"vocab_size", model.vocab_size},
          {"tied_embeddings", model.tied_embeddings}};
}

// What the row was computed for.
Json InputJson(const Deployment& deployment, const NamedPolicy& policy) {
  return {{"world_size", deployment.world_size},
          {"context_tokens", deployment.context_tokens},
          {"new_tokens", deployment.new_tokens},
          {"num_sequences", deployment.num_sequences},
          {"policy", policy.name},
          {"scope", std::string(ScopeName(policy.options.scope))},
          {"recall", policy.options.recall.enabled},
          {"kv_dtype", std::string(KvDtypeName(deployment.kv_dtype))}};
}

void AddMemory(const MemoryPlan& plan, Json& row) {
  const DeviceNeed& device = plan.device;
  row["resident_tokens"] = plan.resident_tokens;
  row["weight_bytes"] = device.weights;
  row["runner_bytes"] = device.runner;
  row["workspace_bytes"] = device.workspace;
  row["kv_bytes"] = device.num_sequences * plan.kv_bytes;
  row["full_kv_bytes"] = device.num_sequences * plan.full_kv_bytes;
  row["kv_ratio"] = static_cast<double>(plan.kv_bytes) / static_cast<double>(plan.full_kv_bytes);
  row["step_bytes"] = device.num_sequences * (device.sequence.step + device.sequence.growth);
  row["prompt_bytes"] = device.sequence.prompt;
  row["prompt_hidden_bytes"] = device.prompt_hidden;
  row["device_memory_bytes"] = device.configured();
  row["total_bytes"] = device.total();
  row["host_bytes"] = plan.host_bytes;
}

void AddStep(const MemoryPlan& plan, const PlanRequest& request, Json& row) {
  const StepReads& step = plan.step;
  row["step_read"] = {{"weight_bytes", step.weights}, {"kv_bytes", step.kv},
                      {"score_bytes", step.scores},   {"sketch_bytes", step.sketches},
                      {"host_bytes", step.host},      {"device_bytes", step.device()}};
  row["step_ms"] = nullptr;
  row["tokens_per_s"] = nullptr;
  if (request.bandwidth_gb_s <= 0) return;
  double seconds = static_cast<double>(step.device()) / (request.bandwidth_gb_s * kGiga);
  if (request.host_bandwidth_gb_s > 0) {
    seconds += static_cast<double>(step.host) / (request.host_bandwidth_gb_s * kGiga);
  }
  row["step_ms"] = seconds * 1e3;
  row["tokens_per_s"] = plan.device.num_sequences / seconds;
}

absl::Status AddFit(const MemoryPlan& plan, const PlanRequest& request,
                    const Deployment& deployment, const ScratchSizes& scratch_sizes, Json& row) {
  row["fits"] = nullptr;
  row["longest_context"] = nullptr;
  if (request.device_bytes == 0) return absl::OkStatus();
  row["fits"] = plan.device.total() <= request.device_bytes;
  HW_ASSIGN_OR_RETURN(row["longest_context"],
                      LongestContext(deployment, scratch_sizes, request.device_bytes));
  return absl::OkStatus();
}

absl::StatusOr<Json> Row(const PlanRequest& request, const Deployment& deployment,
                         const NamedPolicy& policy, const ScratchSizes& scratch_sizes) {
  HW_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(deployment, scratch_sizes));
  Json row = InputJson(deployment, policy);
  AddMemory(plan, row);
  AddStep(plan, request, row);
  HW_RETURN_IF_ERROR(AddFit(plan, request, deployment, scratch_sizes, row));
  return row;
}

}  // namespace

absl::StatusOr<Json> AnswerPlanRequest(const PlanRequest& request,
                                       const ScratchSizes& scratch_sizes) {
  Json rows = Json::array();
  Deployment deployment = request.common;
  for (const int world_size : request.world_sizes) {
    deployment.world_size = world_size;
    for (const int64_t context : request.contexts) {
      deployment.context_tokens = context;
      for (const NamedPolicy& policy : request.policies) {
        deployment.policy = policy.options;
        HW_ASSIGN_OR_RETURN(Json row, Row(request, deployment, policy, scratch_sizes));
        rows.push_back(std::move(row));
      }
    }
  }
  return Json{{"model", ModelJson(request.common.model)}, {"rows", std::move(rows)}};
}

}  // namespace heavywater
