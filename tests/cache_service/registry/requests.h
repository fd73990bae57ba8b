// Valid requests, for tests to vary.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "heavywater/v1/group.pb.h"
#include "heavywater/v1/sequence.pb.h"

namespace heavywater {

// 2 layers, 2 KV heads, rows of 256 bytes, pages of 16 tokens (4096 bytes).
inline v1::Fingerprint TestFingerprint() {
  v1::Fingerprint fingerprint;
  fingerprint.set_model("test-model");
  fingerprint.set_dtype("bf16");
  fingerprint.set_num_layers(2);
  fingerprint.set_num_kv_heads(2);
  fingerprint.set_head_dim(64);
  fingerprint.set_rope("10000");
  fingerprint.set_positions("absolute");
  fingerprint.set_page_tokens(16);
  fingerprint.set_format_version(1);
  return fingerprint;
}

inline v1::JoinRequest TestJoin(int rank, int size, const std::string& instance = "") {
  v1::JoinRequest request;
  request.set_group("group");
  request.set_rank(rank);
  request.set_size(size);
  request.set_instance(instance.empty() ? absl::StrCat("instance-", rank) : instance);
  *request.mutable_fingerprint() = TestFingerprint();
  request.set_config_digest("policy=snapkv_h2o budget=0.2");
  request.set_advertised_address(absl::StrCat("127.0.0.1:", 9000 + rank));
  request.set_timeout_ms(10'000);
  return request;
}

inline v1::OpenSequenceRequest TestOpen(const std::string& request_id, uint64_t epoch) {
  v1::OpenSequenceRequest request;
  request.set_request_id(request_id);
  request.set_group("group");
  request.set_epoch(epoch);
  *request.mutable_fingerprint() = TestFingerprint();
  request.mutable_budget()->set_policy("snapkv_h2o");
  request.mutable_budget()->set_scope("layer");
  request.mutable_budget()->set_budget_tokens(8);
  request.mutable_budget()->set_sink_tokens(1);
  request.mutable_budget()->set_recent_tokens(4);
  request.set_prompt_tokens(20);
  request.set_max_tokens(1000);
  return request;
}

// A group goes on with the sequence that `opened` opened; without tokens yet.
inline v1::ReopenSequenceRequest TestReopen(const v1::OpenSequenceRequest& opened,
                                            uint64_t sequence, uint64_t epoch) {
  v1::ReopenSequenceRequest request;
  request.set_sequence_id(sequence);
  request.set_group(opened.group());
  request.set_epoch(epoch);
  *request.mutable_policy() = opened.policy();
  *request.mutable_budget() = opened.budget();
  request.set_prompt_tokens(opened.prompt_tokens());
  request.set_max_tokens(opened.max_tokens());
  request.set_tenant(opened.tenant());
  return request;
}

// The only report of a sequence, its last.
inline v1::ReportPlanRequest TestFinished(uint64_t epoch, uint64_t sequence, int tokens_seen) {
  v1::ReportPlanRequest request;
  request.set_group("group");
  request.set_epoch(epoch);
  v1::PlanReport& report = *request.add_reports();
  report.set_sequence_id(sequence);
  report.set_plan(1);
  report.set_tokens_seen(tokens_seen);
  report.set_finished(true);
  return request;
}

// Rank 0's: the tokens 100, 101, ..., all of them stored, and a state to go on from.
inline void AddTestState(int64_t tokens, v1::PlanReport& report) {
  report.set_watermark(tokens);
  report.mutable_snapshot()->set_data("state");
  report.mutable_snapshot()->set_total_bytes(5);
  for (int64_t token = 0; token < tokens; ++token) {
    report.add_tokens(static_cast<int32_t>(100 + token));
  }
}

}  // namespace heavywater
