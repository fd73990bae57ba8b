#include "worker/server/generation_request.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/tiny_model.h"
#include "worker/server/policy_proto.h"
#include "worker/server/turn_request.h"
#include "worker/server/worker_config.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class GenerationRequestTest : public ::testing::Test {
 protected:
  absl::StatusOr<GenerationRequest> Parse(const v1::GenerateRequest& request) const {
    return ParseGenerateRequest(request, {.tokenizer = tokenizer_,
                                          .context_tokens = kTinyContext,
                                          .vocab_size = kTinyVocab,
                                          .shape = {.num_layers = 1}});
  }

  const Tokenizer tokenizer_ = TinyTokenizer();
};

v1::GenerateRequest Conversation() {
  v1::GenerateRequest request;
  request.set_max_new_tokens(3);
  for (const auto& [role, content] : {std::pair("user", "ab"), {"assistant", "c"}, {"user", "b"}}) {
    v1::ChatMessage& message = *request.add_messages();
    message.set_role(role);
    message.set_content(content);
  }
  return request;
}

absl::StatusOr<GenerationRequest> ParseWithTemplate(const v1::GenerateRequest& request,
                                                    const std::string& chat_template) {
  TokenizerSpec spec = TinyTokenizer().spec();
  spec.chat_template = chat_template;
  const Tokenizer tokenizer = *Tokenizer::Create(std::move(spec));
  return ParseGenerateRequest(request, {.tokenizer = tokenizer,
                                        .context_tokens = kTinyContext,
                                        .vocab_size = kTinyVocab,
                                        .shape = {.num_layers = 1}});
}

v1::GenerateRequest Good() {
  v1::GenerateRequest request;
  request.add_tokens(5);
  request.set_max_new_tokens(3);
  return request;
}

struct BadCase {
  const char* name;
  std::function<void(v1::GenerateRequest&)> spoil;
  absl::StatusCode code;
  std::vector<const char*> says;  // field, got, wanted
};

std::vector<BadCase> BadCases() {
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  using Request = v1::GenerateRequest;
  return {
      {"neither", [](Request& r) { r.clear_tokens(); }, invalid, {"text", "tokens", "exactly one"}},
      {"both", [](Request& r) { r.set_text("x"); }, invalid, {"text", "tokens", "exactly one"}},
      {"text", [](Request& r) { r.clear_tokens(), r.set_text("a\xff"); }, invalid, {"text", "1"}},
      {"above", [](Request& r) { r.add_tokens(261); }, invalid, {"tokens[1]", "261", "[0, 261)"}},
      {"below", [](Request& r) { r.set_tokens(0, -1); }, invalid, {"tokens[0]", "-1"}},
      {"none new", [](Request& r) { r.set_max_new_tokens(0); }, invalid, {"max_new_tokens is 0"}},
      {"negative", [](Request& r) { r.set_max_new_tokens(-2); }, invalid, {"max_new_tokens is -2"}},
      {"long",
       [](Request& r) { r.set_max_new_tokens(64); },
       absl::StatusCode::kOutOfRange,
       {"65", "64"}},
      {"long suffix",
       [](Request& r) {
         for (int i = 0; i < 61; ++i) r.add_suffix_tokens(1);
       },
       absl::StatusCode::kOutOfRange,
       {"61 appended", "65", "64"}},
      {"both suffixes",
       [](Request& r) { r.add_suffix_tokens(1), r.set_suffix_text("x"); },
       invalid,
       {"suffix_text has 1", "suffix_tokens has 1", "at most one"}},
      {"suffix", [](Request& r) { r.add_suffix_tokens(261); }, invalid, {"suffix_tokens[0]"}},
      {"suffix text",
       [](Request& r) { r.set_suffix_text("a\xff"); },
       invalid,
       {"suffix_text", "1"}},
      {"top_p",
       [](Request& r) { r.mutable_sampling()->set_top_p(1.5); },
       invalid,
       {"sampling.top_p is 1.5", "from 0 (all tokens) to 1"}},
      {"top_p nan",
       [=](Request& r) { r.mutable_sampling()->set_top_p(static_cast<float>(nan)); },
       invalid,
       {"sampling.top_p is nan"}},
      {"top_k",
       [](Request& r) { r.mutable_sampling()->set_top_k(-1); },
       invalid,
       {"sampling.top_k is -1", "want 0 (all tokens) or more"}},
      {"cold",
       [](Request& r) { r.mutable_sampling()->set_temperature(-1); },
       invalid,
       {"sampling.temperature", "-1"}},
      {"nan",
       [=](Request& r) { r.mutable_sampling()->set_temperature(nan); },
       invalid,
       {"sampling.temperature", "nan"}},
      {"hot",
       [=](Request& r) { r.mutable_sampling()->set_temperature(infinity); },
       invalid,
       {"sampling.temperature", "inf"}},
      {"forced", [](Request& r) { r.add_forced_tokens(300); }, invalid, {"forced_tokens[0]"}},
      {"count",
       [](Request& r) { r.add_forced_tokens(3); },
       invalid,
       {"max_new_tokens is 3", "forced_tokens, 1"}},
      {"id",
       [](Request& r) { r.set_request_id(std::string(1 << 20, 'x')); },
       invalid,
       {"request_id", "1048576", "128"}},
      {"tenant",
       [](Request& r) { r.set_tenant(std::string(129, 'x')); },
       invalid,
       {"tenant", "129", "128"}},
      {"long name",
       [](Request& r) { r.mutable_policy()->set_pooling(std::string(200, 'x')); },
       invalid,
       {"policy.pooling", "200", "128"}},
      {"policy",
       [](Request& r) { r.mutable_policy()->set_policy("lru"); },
       invalid,
       {"policy.policy", "lru", "snapkv_h2o"}},
      {"scope",
       [](Request& r) { r.mutable_policy()->set_scope("sun"); },
       invalid,
       {"policy.scope", "sun", "kv_head"}},
      {"pooling",
       [](Request& r) { r.mutable_policy()->set_pooling("median"); },
       invalid,
       {"policy.pooling", "median", "average"}},
      {"heavy",
       [](Request& r) { r.mutable_policy()->set_heavy_tokens(-5); },
       invalid,
       {"policy.heavy_tokens", "-5"}},
      {"ratio",
       [=](Request& r) { r.mutable_policy()->set_recent_ratio(nan); },
       invalid,
       {"policy.recent_ratio", "nan"}},
      {"ratio above 1",
       [](Request& r) { r.mutable_policy()->set_heavy_ratio(1.5); },
       invalid,
       {"heavy_ratio", "1.5"}},
      {"sinks",
       [](Request& r) { r.mutable_policy()->set_sink_tokens(-1); },
       invalid,
       {"policy.sink_tokens", "-1"}},
      {"decay", [](Request& r) { r.mutable_policy()->set_decay(2); }, invalid, {"decay", "2"}},
      {"interval",
       [](Request& r) { r.mutable_policy()->set_plan_interval_steps(-1); },
       invalid,
       {"policy.plan_interval_steps", "-1"}},
      {"kernel",
       [](Request& r) { r.mutable_policy()->set_pool_kernel(4); },
       invalid,
       {"pool_kernel", "4"}},
      {"no picks",
       [](Request& r) { r.mutable_policy()->set_recall_tokens(-1); },
       invalid,
       {"policy.recall_tokens", "-1"}},
      {"many picks",
       [](Request& r) { r.mutable_policy()->set_recall_tokens(5000); },
       invalid,
       {"recall_tokens", "5000", "4096"}},
      {"share",
       [=](Request& r) { r.mutable_policy()->set_recall_min_share(nan); },
       invalid,
       {"recall_min_share", "nan"}},
      {"channels",
       [](Request& r) { r.mutable_policy()->set_sketch_channels(4); },
       invalid,
       {"sketch_channels", "4", "multiple of 8"}},
      {"candidates",
       [](Request& r) { r.mutable_policy()->set_promote_candidates(-2); },
       invalid,
       {"promote_candidates", "-2"}},
      {"recall of nothing",
       [](Request& r) {
         r.mutable_policy()->set_policy("full");
         r.mutable_policy()->set_recall(true);
       },
       invalid,
       {"recall is true", "full"}},
      {"all of nothing",
       [](Request& r) { r.mutable_policy()->set_recall_all(true); },
       invalid,
       {"recall_all", "recall true"}},
      {"reads of nothing",
       [](Request& r) { r.set_return_reads(true); },
       invalid,
       {"return_reads is true", "policy.recall"}},
      {"device ratio",
       [](Request& r) {
         r.mutable_policy()->set_policy("recall");
         r.mutable_policy()->set_device_ratio(2);
       },
       invalid,
       {"device_ratio", "2"}},
      {"device ratio and heavy",
       [](Request& r) {
         r.mutable_policy()->set_policy("recall");
         r.mutable_policy()->set_device_ratio(0.1);
         r.mutable_policy()->set_heavy_tokens(100);
       },
       invalid,
       {"heavy_tokens is 100", "device_ratio"}},
      {"budget",
       [](Request& r) {
         r.mutable_policy()->set_heavy_tokens(2);
         r.mutable_policy()->set_recent_tokens(2);
         r.mutable_policy()->set_sink_tokens(4);
       },
       invalid,
       {"sink"}},
  };
}

TEST_F(GenerationRequestTest, NamesTheFieldWhatCameAndWhatWasWanted) {
  for (const BadCase& bad : BadCases()) {
    v1::GenerateRequest request = Good();
    bad.spoil(request);
    const auto parsed = Parse(request);
    EXPECT_EQ(parsed.status().code(), bad.code) << bad.name << ": " << parsed.status();
    for (const char* part : bad.says) {
      EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(part)) << bad.name;
    }
  }
}

TEST_F(GenerationRequestTest, AtPlacesInABoundedCacheGenerationMayGoPastTheContext) {
  v1::GenerateRequest request = Good();
  request.set_max_new_tokens(10 * kTinyContext);
  EXPECT_EQ(Parse(request).status().code(), absl::StatusCode::kOutOfRange);
  v1::PolicyOptions& policy = *request.mutable_policy();
  policy.set_policy("h2o");
  policy.set_positions("cache_relative");
  policy.set_heavy_tokens(10);
  policy.set_recent_tokens(kTinyContext - 11);  // and the token that comes
  const auto parsed = Parse(request);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->sequence.policy.positions, Positions::kCacheRelative);

  policy.set_recent_tokens(kTinyContext - 10);
  EXPECT_EQ(Parse(request).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Parse(request).status().message()),
              HasSubstr("heavy + recent + plan_interval_steps is 65, want at most the 64 places"));
  policy.set_policy("full");
  EXPECT_EQ(Parse(request).status().code(), absl::StatusCode::kOutOfRange);
}

TEST_F(GenerationRequestTest, FillsInTheDefaultsOfTheSystemAsOrdered) {
  const auto parsed = Parse(Good());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const v1::PolicyOptions policy = PolicyToProto(parsed->sequence.policy);
  EXPECT_EQ(policy.policy(), "snapkv_h2o");
  EXPECT_EQ(policy.scope(), "layer");
  EXPECT_EQ(policy.heavy_ratio(), 0.1);
  EXPECT_EQ(policy.recent_ratio(), 0.1);
  EXPECT_EQ(policy.min_budget_tokens(), 256);
  EXPECT_EQ(policy.window(), 32);
  EXPECT_EQ(policy.pooling(), "average");
  EXPECT_EQ(policy.pool_kernel(), 5);
  EXPECT_EQ(policy.plan_interval_steps(), 1);
  EXPECT_EQ(policy.decay(), 1.0);
  EXPECT_EQ(parsed->tenant, "default");
  EXPECT_EQ(parsed->sequence.max_tokens, 1 + 3 - 1);
}

// A sequence of an earlier build, which did not know all fields of a policy.
TEST_F(GenerationRequestTest, ATurnHasTheStoredPolicyWhereFieldsCameLater) {
  v1::GenerateRequest request = Good();
  request.mutable_policy()->set_policy("recall");
  request.add_tokens(1);
  v1::Sequence known;
  known.set_prompt_tokens(1);
  *known.mutable_policy() = PolicyToProto(Parse(request)->sequence.policy);
  known.mutable_policy()->clear_recall_wait();
  const GenerationLimits limits = {.tokenizer = tokenizer_,
                                   .context_tokens = kTinyContext,
                                   .vocab_size = kTinyVocab,
                                   .shape = {.num_layers = 1}};
  const auto turn = ParseTurn(request, known, limits);
  EXPECT_TRUE(turn.ok()) << turn.status();
  request.mutable_policy()->set_recall_wait(true);
  EXPECT_THAT(std::string(ParseTurn(request, known, limits).status().message()),
              HasSubstr("recall_wait: false -> true"));
}

TEST_F(GenerationRequestTest, ARequestWithoutAPolicyGetsTheServersDefault) {
  const auto parsed = ParseGenerateRequest(Good(), {.tokenizer = tokenizer_,
                                                    .context_tokens = kTinyContext,
                                                    .vocab_size = kTinyVocab,
                                                    .default_policy = "recall"});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(parsed->sequence.policy.recall.enabled);
  EXPECT_FALSE(Parse(Good())->sequence.policy.recall.enabled);
}

TEST_F(GenerationRequestTest, TheDefaultPolicyOfAWorkerMustBeOne) {
  v1::WorkerConfig config = DefaultWorkerConfig();
  config.set_model("model.gguf");
  EXPECT_TRUE(CheckWorkerConfig(config).ok());
  config.set_default_policy("recall");
  absl::Status status = CheckWorkerConfig(config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cache_address is empty"));
  config.set_cache_address("127.0.0.1:7700");
  EXPECT_TRUE(CheckWorkerConfig(config).ok());
  config.set_page_tokens(24);
  status = CheckWorkerConfig(config);
  EXPECT_THAT(std::string(status.message()), HasSubstr("page_tokens is 24"));
  config.set_default_policy("lru");
  status = CheckWorkerConfig(config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("default_policy: preset is \"lru\""));
}

TEST_F(GenerationRequestTest, TextIsTokenisedAsItStandsWithControlTokens) {
  v1::GenerateRequest request;
  request.set_text("abc<end>a");
  request.set_max_new_tokens(1);
  const auto parsed = Parse(request);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_THAT(parsed->prompt, ElementsAre(258, kTinyEnd, 'a'));
}

TEST_F(GenerationRequestTest, ASuffixIsTokenisedAndCountedLikeAPrompt) {
  v1::GenerateRequest request = Good();
  request.set_suffix_text("abc<end>a");
  const auto parsed = Parse(request);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_THAT(parsed->suffix, ElementsAre(258, kTinyEnd, 'a'));
  EXPECT_EQ(parsed->sequence.prompt_tokens, 1);
  EXPECT_EQ(parsed->sequence.max_tokens, 1 + 3 + 3 - 1);
}

TEST_F(GenerationRequestTest, ForcedTokensSetTheNumberOfNewOnes) {
  v1::GenerateRequest request = Good();
  request.set_max_new_tokens(0);
  for (int32_t token : {7, 8}) request.add_forced_tokens(token);
  const auto parsed = Parse(request);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->max_new_tokens, 2);
  EXPECT_THAT(parsed->forced, ElementsAre(7, 8));
}

TEST_F(GenerationRequestTest, MessagesAreThePromptThatTheModelsTemplateMakesOfThem) {
  const auto parsed = ParseWithTemplate(
      Conversation(),
      "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}a");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  v1::GenerateRequest by_text;
  by_text.set_max_new_tokens(3);
  const std::string end = tokenizer_.spec().tokens[kTinyEnd];
  by_text.set_text("uab" + end + "ac" + end + "ub" + end + "a");
  EXPECT_EQ(parsed->prompt, Parse(by_text)->prompt);
  EXPECT_EQ(std::ranges::count(parsed->prompt, kTinyEnd), 3) << "control tokens are recognised";
}

TEST_F(GenerationRequestTest, WhyMessagesCannotBeRenderedIsSaid) {
  const absl::Status none = Parse(Conversation()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(none)) << none;
  EXPECT_THAT(none.message(), HasSubstr("no chat template"));
  const absl::Status refused =
      ParseWithTemplate(Conversation(), "{{ raise_exception('no system') }}").status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("messages: the model's chat template: no system"));
  for (const char* unknown : {"{{ messages | tojson }}", "{{ messages | }}"}) {
    const absl::Status status = ParseWithTemplate(Conversation(), unknown).status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("more than this server renders (send text)"));
  }
  v1::GenerateRequest both = Conversation();
  both.set_text("x");
  EXPECT_THAT(ParseWithTemplate(both, "a").status().message(), HasSubstr("exactly one"));
  v1::GenerateRequest many = Good();
  many.clear_tokens();
  for (int i = 0; i < 4097; ++i) many.add_messages();
  EXPECT_THAT(ParseWithTemplate(many, "a").status().message(), HasSubstr("4096 or fewer"));
}

}  // namespace
}  // namespace heavywater
