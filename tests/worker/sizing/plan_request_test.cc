// Questions and answers in JSON.
#include "worker/sizing/plan_request.h"

#include <nlohmann/json.hpp>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/tiny_llama.h"
#include "worker/sizing/plan_json.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

const ScratchSizes kNoScratch;

Json Request() {
  return Json::parse(R"({"model": "llama-3-8b", "world_sizes": [1, 2], "contexts": [4096, 8192],
                         "policies": [{"policy": "full"}, {"policy": "recall"}]})");
}

Json Shape() {
  return Json::parse(R"({"num_layers": 2, "hidden_size": 64, "num_query_heads": 4,
                         "num_kv_heads": 2, "head_dim": 16, "ffn_size": 128, "vocab_size": 100})");
}

nlohmann::ordered_json Answer(const Json& request) {
  const auto parsed = ParsePlanRequest(request.dump());
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  const auto answer = AnswerPlanRequest(*parsed, kNoScratch);
  EXPECT_TRUE(answer.ok()) << answer.status();
  return *answer;
}

std::string ErrorOf(const Json& request) {
  return std::string(ParsePlanRequest(request.dump()).status().message());
}

TEST(PlanRequestTest, ARowForEachWorldSizeContextAndPolicyInThisOrder) {
  const auto rows = Answer(Request())["rows"];
  ASSERT_EQ(rows.size(), 8);
  EXPECT_EQ(rows[1]["policy"], "recall");
  EXPECT_EQ(rows[2]["context_tokens"], 8192);
  EXPECT_EQ(rows[4]["world_size"], 2);
  EXPECT_EQ(rows[0]["total_bytes"].get<int64_t>(),
            rows[0]["weight_bytes"].get<int64_t>() + rows[0]["runner_bytes"].get<int64_t>() +
                rows[0]["prompt_hidden_bytes"].get<int64_t>() +
                rows[0]["device_memory_bytes"].get<int64_t>());
}

TEST(PlanRequestTest, WhatWasNotAskedIsNull) {
  Json request = Request();
  auto row = Answer(request)["rows"][0];
  for (const char* field : {"step_ms", "tokens_per_s", "fits", "longest_context"}) {
    EXPECT_TRUE(row[field].is_null()) << field;
  }
  request["bandwidth_gb_s"] = 1000;
  request["device_bytes"] = int64_t{80} << 30;
  row = Answer(request)["rows"][0];
  const double bytes = row["step_read"]["device_bytes"].get<double>();
  EXPECT_DOUBLE_EQ(row["step_ms"].get<double>(), bytes / 1e12 * 1e3);
  EXPECT_DOUBLE_EQ(row["tokens_per_s"].get<double>(), 1e12 / bytes);
  EXPECT_TRUE(row["fits"].get<bool>());
  EXPECT_GT(row["longest_context"].get<int64_t>(), 8192);
}

TEST(PlanRequestTest, TheBusToHostMemoryAddsTheTimeOfThePicks) {
  Json request = Request();
  request["bandwidth_gb_s"] = 1000;
  const auto without = Answer(request)["rows"][3];
  request["host_bandwidth_gb_s"] = 50;
  const auto with = Answer(request)["rows"][3];
  EXPECT_NEAR(with["step_ms"].get<double>() - without["step_ms"].get<double>(),
              with["step_read"]["host_bytes"].get<double>() / 50e9 * 1e3, 1e-9);
  EXPECT_GT(with["step_read"]["host_bytes"], 0);
}

TEST(PlanRequestTest, PolicyFieldsReplaceThePresets) {
  Json request = Request();
  request["policies"] = Json::parse(
      R"([{"policy": "recall", "heavy_ratio": 0.05, "recent_ratio": 0.05, "recall_tokens": 32},
          {"policy": "snapkv_h2o", "device_ratio": 0.1, "recent_tokens": 32, "recall": true}])");
  const PlanRequest parsed = ParsePlanRequest(request.dump()).value();
  EXPECT_EQ(parsed.policies[0].options.device_ratio, 0);
  EXPECT_EQ(parsed.policies[0].options.recent_tokens, 0);
  EXPECT_EQ(parsed.policies[0].options.recall.recall_tokens, 32);
  EXPECT_EQ(parsed.policies[1].options.device_ratio, 0.1);
  EXPECT_TRUE(parsed.policies[1].options.recall.enabled);
}

TEST(PlanRequestTest, AModelMayBeAFileOrAShape) {
  Json request = Request();
  const TemporaryFile file(TinyLlama({}, 1).File());
  request["model"] = {{"gguf", file.path()}};
  request["world_sizes"] = {3};
  EXPECT_EQ(Answer(request)["model"]["num_kv_heads"], 3);
  request["model"] = Shape();
  request["world_sizes"] = {2};
  EXPECT_EQ(Answer(request)["model"]["vocab_size"], 100);
}

TEST(PlanRequestTest, WhatIsWrongIsNamed) {
  const struct {
    const char* pointer;
    Json value;
    const char* error;
  } cases[] = {
      {"/model", "gpt-2", "model is 'gpt-2', want one of: llama-3-8b"},
      {"/model", 3, "model."},
      {"/model", {{"gguf", "/no/such/file"}}, "/no/such/file"},
      {"/model", {{"num_layers", 3}}, "model.hidden_size is missing"},
      {"/world_sizes", Json::array(), "world_sizes is missing, want a list"},
      {"/world_sizes/0", 0, "world_sizes is 0, want 1 to"},
      {"/contexts/0", "long", "contexts is \"long\""},
      {"/contexts/0", int64_t{1} << 40, "contexts is 1099511627776, want 1 to"},
      {"/policies/0/policy", "lru", "\"lru\", want one of"},
      {"/policies/0/heavy_ratio", -1, "policy.heavy_ratio is -1"},
      {"/policies/0/recall", 1, "policy.recall is 1, want true or false"},
      {"/policies/0/heavy", 1, "policy.heavy is given, but there is no such field"},
      {"/kv_dtype", "int3", "kv_dtype is \"int3\""},
      {"/device_bytes", 1.5, "device_bytes is 1.5"},
      {"/bandwidth_gb_s", "fast", "bandwidth_gb_s is \"fast\""},
      {"/gpus", 3, "gpus is given, but there is no such field"},
  };
  for (const auto& one : cases) {
    Json request = Request();
    request[Json::json_pointer(one.pointer)] = one.value;
    EXPECT_THAT(ErrorOf(request), HasSubstr(one.error));
  }
  EXPECT_EQ(ParsePlanRequest("[1]").status().message(), "the request is no JSON object");
  EXPECT_EQ(ParsePlanRequest("{").status().message(), "the request is no JSON object");
}

TEST(PlanRequestTest, EachSizeOfAShapeIsChecked) {
  const Json shape = Shape();
  for (const auto& [name, value] : shape.items()) {
    Json request = Request();
    request["model"] = shape;
    request["model"][name] = 0;
    EXPECT_THAT(ErrorOf(request), HasSubstr("model." + name + " is 0, want 1 to"));
    request["model"].erase(name);
    EXPECT_EQ(ErrorOf(request), "model." + name + " is missing");
  }
  Json request = Request();
  request["model"] = Shape();
  request["model"]["num_query_heads"] = 5;
  EXPECT_THAT(ErrorOf(request), HasSubstr("model.num_query_heads is 5, want a multiple"));
}

TEST(PlanRequestTest, TooManyRowsAreRefused) {
  Json request = Request();
  request["contexts"] = std::vector<int>(2000, 4096);
  EXPECT_THAT(ErrorOf(request), HasSubstr("ask for 8000 rows, want at most 4096"));
}

}  // namespace
}  // namespace heavywater
