#include "worker/server/scheduler.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/test_group.h"

namespace heavywater {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

class SchedulerTest : public ::testing::Test {
 protected:
  std::vector<int32_t> GenerateAlone(const v1::GenerateRequest& request) {
    ServerTestGroup group(model_, 1);
    group.Start();
    return group.Generate(request).tokens();
  }

  TinyModel model_;
};

TEST_F(SchedulerTest, GivesEveryTokenOnceAndThenASummary) {
  ServerTestGroup group(model_, 1);
  group.Start();
  const Generated generated = group.Generate(Bounded(SomeTokens(21, 1), 12));
  ASSERT_TRUE(generated.status.ok()) << generated.status;
  ASSERT_THAT(generated.messages, SizeIs(12));
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(generated.messages[static_cast<size_t>(i)].index(), i);
    EXPECT_EQ(generated.messages[static_cast<size_t>(i)].counts().tokens_seen(), 21 + i);
  }
  EXPECT_NE(generated.messages[0].sequence_id(), 0u);
  EXPECT_EQ(generated.summary.finish_reason(), "length");
  EXPECT_EQ(generated.summary.prompt_tokens(), 21);
  EXPECT_EQ(generated.summary.new_tokens(), 12);
  // The last token is given out, not taken in; 11 plans follow the prompt's end.
  EXPECT_EQ(generated.summary.counts().tokens_seen(), 32);
  EXPECT_EQ(generated.summary.plan(), 12);
  EXPECT_EQ(generated.summary.budget().budget_tokens(), 12);
  EXPECT_EQ(generated.summary.counts().tokens_resident(), 12);
  // No cache service, no host tier: what is evicted is dropped.
  EXPECT_EQ(generated.summary.counts().tokens_dropped(), 20);
  EXPECT_EQ(generated.summary.counts().tokens_demoted(), 0);
  EXPECT_EQ(generated.summary.host_bytes(), 0);
  EXPECT_FALSE(generated.summary.has_recall());
}

// The figure of a line "name{labels} figure" of what Prometheus would read.
double FigureOf(const std::string& metrics, const std::string& series) {
  const size_t at = metrics.find("\n" + series + " ");
  if (at == std::string::npos) return -1;
  return std::stod(metrics.substr(at + series.size() + 2));
}

TEST_F(SchedulerTest, MetricsTellWhereTheTimeOfStepsGoesOnEveryRank) {
  ServerTestGroup group(model_, 3);
  const auto start = absl::Now();
  group.Start();
  ASSERT_TRUE(group.Generate(Bounded(SomeTokens(21, 1), 12)).status.ok());
  group.Stop();
  const double passed = absl::ToDoubleSeconds(absl::Now() - start);
  for (int rank = 0; rank < 3; ++rank) {
    double sum = 0;
    for (const char* phase :
         {"matrices", "attention", "scores", "plan", "reduce", "report", "other"}) {
      const double seconds =
          FigureOf(group.Metrics(rank),
                   absl::StrCat("heavywater_step_phase_seconds_total{phase=\"", phase, "\"}"));
      EXPECT_GT(seconds, 0) << phase << " of rank " << rank;
      sum += seconds;
    }
    EXPECT_LT(sum, passed) << rank;
    EXPECT_THAT(group.Metrics(rank), Not(HasSubstr("phase=\"outside\"")));
  }
}

TEST_F(SchedulerTest, MetricsCountTokensPlansAndEvictionsOfEveryRank) {
  ServerTestGroup group(model_, 3);
  group.Start();
  ASSERT_TRUE(group.Generate(Bounded(SomeTokens(21, 1), 12)).status.ok());
  group.Stop();
  EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_tokens_generated_total 12\n"));
  EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_prompt_tokens_total 21\n"));
  EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_step_seconds_count{phase=\"decode\"} 11\n"));
  EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_sequences{state=\"queued\"} 0\n"));
  for (int rank = 0; rank < 3; ++rank) {
    // 11 plans; 32 positions seen, 12 slots.
    EXPECT_THAT(group.Metrics(rank), HasSubstr("heavywater_plans_total 11\n"));
    EXPECT_THAT(group.Metrics(rank), HasSubstr("heavywater_evicted_positions_total 20\n"));
    // One goes at each plan, of each layer; the prompt's were in no slot.
    EXPECT_THAT(group.Metrics(rank), HasSubstr(absl::StrCat("heavywater_eviction_age_tokens_count ",
                                                            11 * kTinyLayers, "\n")));
  }
}

TEST_F(SchedulerTest, TheSummaryCountsBytesOfAllRanks) {
  const auto bytes = [&](int size) {
    ServerTestGroup group(model_, size);
    group.Start();
    const Generated generated = group.Generate(Bounded(SomeTokens(40, 1), 4, "full"));
    EXPECT_TRUE(generated.status.ok()) << generated.status;
    EXPECT_EQ(generated.summary.tensor_parallel(), size);
    return generated.summary;
  };
  const v1::GenerateSummary one = bytes(1);
  const v1::GenerateSummary three = bytes(3);
  // 43 tokens in pages of 8: 48 rows of K and V in float32.
  const int64_t full = int64_t{48} * 2 * kTinyHeadDim * 4 * kTinyKvHeads * kTinyLayers;
  EXPECT_EQ(one.full_cache_bytes(), full);
  EXPECT_EQ(three.full_cache_bytes(), full);
  EXPECT_GE(one.device_bytes_peak(), full);
  EXPECT_GE(three.device_bytes_peak(), full);
  EXPECT_GE(one.device_bytes_prompt_peak(), one.device_bytes_peak() / 2);
}

TEST_F(SchedulerTest, ThreeRanksGenerateWhatOneDoes) {
  for (const char* policy : {"full", "streaming", "h2o", "snapkv", "snapkv_h2o"}) {
    std::vector<std::vector<int32_t>> tokens;
    for (int size : {1, 3}) {
      ServerTestGroup group(model_, size);
      group.Start();
      const Generated generated = group.Generate(Bounded(SomeTokens(30, 5), 16, policy));
      ASSERT_TRUE(generated.status.ok()) << policy << ": " << generated.status;
      tokens.push_back(generated.tokens());
    }
    EXPECT_EQ(tokens[0], tokens[1]) << policy;
  }
}

TEST_F(SchedulerTest, RaggedSequencesInOneBatchEqualEachAlone) {
  const std::vector<v1::GenerateRequest> requests = {
      Bounded(SomeTokens(37, 1), 20), Bounded(SomeTokens(3, 2), 9, "full"),
      Bounded(SomeTokens(16, 3), 14, "h2o"), Bounded(SomeTokens(25, 4), 1)};
  std::vector<Generated> alone;
  for (const auto& request : requests) {
    ServerTestGroup group(model_, 1);
    group.Start();
    alone.push_back(group.Generate(request));
  }
  ServerTestGroup group(model_, 1);
  // All are queued before the first step, so that they do run together.
  std::vector<std::shared_ptr<ServedGeneration>> together;
  for (const auto& request : requests) {
    auto generation = group.engine().Start(request);
    ASSERT_TRUE(generation.ok()) << generation.status();
    together.push_back(*generation);
  }
  group.Start();
  for (size_t i = 0; i < requests.size(); ++i) {
    const Generated generated = ServerTestGroup::ReadAll(*together[i]);
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    EXPECT_EQ(generated.tokens(), alone[i].tokens()) << i;
    for (size_t t = 0; t < generated.messages.size(); ++t) {
      EXPECT_EQ(generated.messages[t].logprob(), alone[i].messages[t].logprob()) << i << " " << t;
    }
  }
}

TEST_F(SchedulerTest, PromptsThatWaitShareChunksAndGiveWhatEachGivesAlone) {
  const auto configure = [](v1::WorkerConfig& config) { config.set_prompt_chunk_tokens(128); };
  // The first four fit a chunk; the fifth is too long for it, the last too short to share.
  const std::vector<int> lengths = {40, 17, 33, 20, 50, 9};
  std::vector<std::vector<int32_t>> alone;
  ServerTestGroup one(model_, 3, configure);
  one.Start();
  for (size_t i = 0; i < lengths.size(); ++i) {
    alone.push_back(one.Generate(Bounded(SomeTokens(lengths[i], static_cast<int>(i)), 8)).tokens());
  }
  one.Stop();
  ServerTestGroup group(model_, 3, configure);
  std::vector<std::shared_ptr<ServedGeneration>> generations;
  for (size_t i = 0; i < lengths.size(); ++i) {
    generations.push_back(
        *group.engine().Start(Bounded(SomeTokens(lengths[i], static_cast<int>(i)), 8)));
  }
  group.Start();
  for (size_t i = 0; i < lengths.size(); ++i) {
    const Generated generated = ServerTestGroup::ReadAll(*generations[i]);
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    EXPECT_EQ(generated.tokens(), alone[i]) << i;
    EXPECT_THAT(generated.tokens(), SizeIs(8));
    group.engine().End(*generations[i], true);
  }
  group.Stop();
  const std::string chunks = "heavywater_step_seconds_count{phase=\"prompt\"}";
  EXPECT_EQ(FigureOf(one.Metrics(0), chunks), 6 * kTinyLayers);
  EXPECT_EQ(FigureOf(group.Metrics(0), chunks), 3 * kTinyLayers);
}

TEST_F(SchedulerTest, OneOfABatchOfPromptsThatIsCancelledLeavesTheOthersAlone) {
  ServerTestGroup group(model_, 1, [](v1::WorkerConfig& config) {
    config.set_prompt_chunk_tokens(128);
    config.set_max_stall_ms(0);  // a chunk a round
  });
  const auto first = *group.engine().Start(Bounded(SomeTokens(30, 1), 4));
  const auto second = *group.engine().Start(Bounded(SomeTokens(20, 2), 4));
  ASSERT_TRUE(group.scheduler().RunOnce().ok());
  first->responses.Cancel();
  for (int round = 0; round < 12; ++round) ASSERT_TRUE(group.scheduler().RunOnce().ok());
  EXPECT_EQ(ServerTestGroup::ReadAll(*first).status.code(), absl::StatusCode::kCancelled);
  const Generated left = ServerTestGroup::ReadAll(*second);
  ASSERT_TRUE(left.status.ok()) << left.status;
  EXPECT_EQ(group.worker(0).runner().cache().num_sequences(), 0);
  EXPECT_EQ(left.tokens(), GenerateAlone(Bounded(SomeTokens(20, 2), 4)));
}

TEST_F(SchedulerTest, ForcedTokensCarryTheLogitsThatPredictedThem) {
  ServerTestGroup group(model_, 1);
  group.Start();
  const std::vector<int32_t> text = SomeTokens(30, 8);
  const std::vector<int32_t> prompt(text.begin(), text.begin() + 20);
  const std::vector<int32_t> forced(text.begin() + 20, text.end());
  v1::GenerateRequest request = Bounded(prompt, 0, "full");
  request.mutable_forced_tokens()->Assign(forced.begin(), forced.end());
  request.set_return_logits(true);
  const Generated generated = group.Generate(request);
  ASSERT_TRUE(generated.status.ok()) << generated.status;
  EXPECT_EQ(generated.summary.finish_reason(), "forced");
  EXPECT_THAT(generated.tokens(), ElementsAreArray(forced));
  for (size_t i = 0; i < forced.size(); ++i) {
    // The same text as a prompt, cut just before the token, predicts it alike.
    v1::GenerateRequest cut = Bounded({text.begin(), text.begin() + 20 + i}, 1, "full");
    cut.set_return_logits(true);
    const Generated one = group.Generate(cut);
    ASSERT_TRUE(one.status.ok()) << one.status;
    std::vector<float> got(kTinyVocab);
    std::vector<float> want(kTinyVocab);
    ASSERT_EQ(generated.messages[i].logits().size(), kTinyVocab * sizeof(float));
    std::memcpy(got.data(), generated.messages[i].logits().data(), kTinyVocab * sizeof(float));
    std::memcpy(want.data(), one.messages[0].logits().data(), kTinyVocab * sizeof(float));
    for (int j = 0; j < kTinyVocab; ++j) EXPECT_NEAR(got[j], want[j], 1e-3) << i << " " << j;
    EXPECT_NEAR(generated.messages[i].logprob(), LogProbability(want, forced[i]), 1e-3);
  }
}

TEST_F(SchedulerTest, TheSameSeedGivesTheSameTokensAndAnotherOneOthers) {
  ServerTestGroup group(model_, 1);
  group.Start();
  v1::GenerateRequest request = Bounded(SomeTokens(12, 3), 24);
  request.mutable_sampling()->set_temperature(1.5);
  request.mutable_sampling()->set_seed(7);
  const std::vector<int32_t> first = group.Generate(request).tokens();
  EXPECT_EQ(group.Generate(request).tokens(), first);
  request.mutable_sampling()->set_seed(8);
  EXPECT_NE(group.Generate(request).tokens(), first);
}

TEST_F(SchedulerTest, EndsAtTheEndOfTurnUnlessTold) {
  ServerTestGroup group(model_, 1);
  group.Start();
  v1::GenerateRequest request = Bounded(SomeTokens(8, 3), 40);
  request.mutable_sampling()->set_temperature(50);  // nearly uniform: <end> comes some time
  request.set_ignore_eos(false);
  Generated generated;
  for (uint64_t seed = 0; seed < 200 && generated.summary.finish_reason() != "eos"; ++seed) {
    request.mutable_sampling()->set_seed(seed);
    generated = group.Generate(request);
    ASSERT_TRUE(generated.status.ok()) << generated.status;
  }
  ASSERT_EQ(generated.summary.finish_reason(), "eos");
  EXPECT_EQ(generated.tokens().back(), kTinyEnd);
  EXPECT_EQ(generated.messages.back().text(), "");
  request.set_ignore_eos(true);
  EXPECT_THAT(group.Generate(request).messages, SizeIs(40));
}

TEST_F(SchedulerTest, ACancelledSequenceFreesItsMemoryAndLeavesOthersAlone) {
  // One chunk of a prompt in each round.
  ServerTestGroup group(model_, 1, [](v1::WorkerConfig& config) { config.set_max_stall_ms(0); });
  RankCache& cache = group.worker(0).runner().cache();
  const int64_t before = cache.memory().reserved_bytes();
  const auto kept = group.engine().Start(Bounded(SomeTokens(20, 1), 30));
  const auto in_prompt = group.engine().Start(Bounded(SomeTokens(40, 2), 20));
  const auto in_decode = group.engine().Start(Bounded(SomeTokens(4, 3), 50));
  ASSERT_TRUE(kept.ok() && in_prompt.ok() && in_decode.ok());
  for (int round = 0; round < 8; ++round) ASSERT_TRUE(group.scheduler().RunOnce().ok());
  EXPECT_EQ(cache.num_sequences(), 3);
  ASSERT_TRUE((*in_decode)->responses.Pop(absl::ZeroDuration()).has_value());
  ASSERT_FALSE((*in_prompt)->responses.Pop(absl::ZeroDuration()).has_value());
  (*in_prompt)->responses.Cancel();
  (*in_decode)->responses.Cancel();
  ASSERT_TRUE(group.scheduler().RunOnce().ok());
  EXPECT_EQ(cache.num_sequences(), 1);
  EXPECT_EQ((*in_prompt)->responses.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ((*in_decode)->responses.status().code(), absl::StatusCode::kCancelled);
  group.Start();
  EXPECT_THAT(ServerTestGroup::ReadAll(**kept).messages, SizeIs(30));
  group.Stop();
  EXPECT_EQ(cache.num_sequences(), 0);
  EXPECT_EQ(cache.memory().reserved_bytes(), before);
}

TEST_F(SchedulerTest, ASlowClientStallsNobodyElse) {
  ServerTestGroup group(model_, 1);
  v1::GenerateRequest heavy = Bounded(SomeTokens(2, 1), 60);
  const auto slow = group.engine().Start(heavy);
  ASSERT_TRUE(slow.ok());
  // Its queue is as good as full from the start.
  for (size_t i = 0; i < ServedGeneration::kMaxUnreadMessages; ++i) {
    (*slow)->responses.Push(v1::GenerateResponse());
  }
  group.Start();
  EXPECT_THAT(group.Generate(Bounded(SomeTokens(3, 2), 40)).messages, SizeIs(40));
  // The prompt's token is all that it got beyond its bound.
  EXPECT_FALSE((*slow)->responses.done());
  const Generated generated = ServerTestGroup::ReadAll(**slow);
  EXPECT_TRUE(generated.status.ok());
  EXPECT_THAT(generated.messages, SizeIs(ServedGeneration::kMaxUnreadMessages + 60));
}

TEST_F(SchedulerTest, AClientThatReadsNothingLosesItsPlace) {
  ServerTestGroup group(model_, 1, [](v1::WorkerConfig& config) {
    config.set_max_batch(1);
    config.set_client_stall_ms(300);
  });
  const auto stalled = group.engine().Start(Bounded(SomeTokens(2, 1), 60));
  ASSERT_TRUE(stalled.ok());
  std::atomic<bool> call_ended = false;
  (*stalled)->responses.OnAbandon([&call_ended] { call_ended = true; });
  for (size_t i = 0; i < ServedGeneration::kMaxUnreadMessages; ++i) {
    (*stalled)->responses.Push(v1::GenerateResponse());
  }
  group.Start();
  // Its place is the only one.
  EXPECT_THAT(group.Generate(Bounded(SomeTokens(3, 2), 40)).messages, SizeIs(40));
  EXPECT_TRUE(call_ended);
  const absl::Status status = (*stalled)->responses.status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("has read nothing for 300ms"));
}

TEST_F(SchedulerTest, AClientThatReadsNowAndThenKeepsItsPlace) {
  ResponseQueue responses(2, 1 << 20);
  EXPECT_EQ(responses.full_since(), absl::InfiniteFuture());
  responses.Push(v1::GenerateResponse());
  EXPECT_EQ(responses.full_since(), absl::InfiniteFuture());
  responses.Push(v1::GenerateResponse());
  const absl::Time since = responses.full_since();
  EXPECT_LE(since, absl::Now());
  responses.Push(v1::GenerateResponse());
  EXPECT_EQ(responses.full_since(), since);
  absl::SleepFor(absl::Milliseconds(2));
  ASSERT_TRUE(responses.Pop(absl::ZeroDuration()).has_value());
  EXPECT_GT(responses.full_since(), since) << "full as before, but it reads";
  EXPECT_LE(responses.full_since(), absl::Now());
  ASSERT_TRUE(responses.Pop(absl::ZeroDuration()).has_value());
  EXPECT_EQ(responses.full_since(), absl::InfiniteFuture());
}

TEST_F(SchedulerTest, MoreThanMaxQueuedAreRefusedAtOnce) {
  ServerTestGroup group(model_, 1, [](v1::WorkerConfig& config) { config.set_max_queued(2); });
  ASSERT_TRUE(group.engine().Start(Bounded(SomeTokens(4, 1), 4)).ok());
  ASSERT_TRUE(group.engine().Start(Bounded(SomeTokens(4, 2), 4)).ok());
  const auto third = group.engine().Start(Bounded(SomeTokens(4, 3), 4));
  EXPECT_EQ(third.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(third.status().message()), HasSubstr("max_queued is 2"));
}

TEST_F(SchedulerTest, WaitsForRoomThatOthersHoldAndRefusesWhatCanNeverFit) {
  const auto need = [&] {
    ServerTestGroup group(model_, 1);
    const auto bytes = group.worker(0).runner().cache().DeviceBytesNeeded(
        {.policy = *Preset("full"), .prompt_tokens = 40, .max_tokens = 47});
    return *bytes + group.worker(0).runner().cache().memory().reserved_bytes();
  }();
  ServerTestGroup group(model_, 1, [&](v1::WorkerConfig& config) {
    config.set_device_memory_bytes(need);  // one such sequence, and the workspace
  });
  const auto refused = group.engine().Start(Bounded(SomeTokens(48, 1), 8, "full"));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("the longest prompt that fits"));
  const auto first = group.engine().Start(Bounded(SomeTokens(40, 1), 8, "full"));
  const auto second = group.engine().Start(Bounded(SomeTokens(40, 2), 8, "full"));
  ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  ASSERT_TRUE(group.scheduler().RunOnce().ok());
  EXPECT_EQ(group.scheduler().num_running(), 1);
  group.Start();
  EXPECT_THAT(ServerTestGroup::ReadAll(**first).messages, SizeIs(8));
  EXPECT_THAT(ServerTestGroup::ReadAll(**second).messages, SizeIs(8));
}

TEST_F(SchedulerTest, StoppingEndsEveryRequestAndEveryRank) {
  ServerTestGroup group(model_, 3, [](v1::WorkerConfig& config) { config.set_max_batch(1); });
  const auto running = group.engine().Start(Bounded(SomeTokens(4, 1), 59));
  const auto waiting = group.engine().Start(Bounded(SomeTokens(4, 2), 59));
  ASSERT_TRUE(running.ok() && waiting.ok());
  group.Start();
  ASSERT_TRUE((*running)->responses.Pop(absl::Seconds(10)).has_value());
  group.Stop();
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(group.status(rank).ok()) << group.status(rank);
  EXPECT_TRUE((*waiting)->responses.status().code() == absl::StatusCode::kUnavailable);
  EXPECT_EQ(group.engine().Start(Bounded(SomeTokens(4, 3), 1)).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(SchedulerTest, WhenARankIsGoneAllRequestsAreUnavailableAndTheOthersEnd) {
  ServerTestGroup group(model_, 3);
  const auto generation = group.engine().Start(Bounded(SomeTokens(4, 1), 59));
  ASSERT_TRUE(generation.ok());
  group.worker(1).runner().communicator().Abort(absl::UnavailableError("killed by the test"));
  group.Start();
  const Generated generated = ServerTestGroup::ReadAll(**generation);
  EXPECT_EQ(generated.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(generated.status.message()), HasSubstr("worker group failed"));
  group.Stop();
  for (int rank = 0; rank < 3; ++rank) EXPECT_FALSE(group.status(rank).ok()) << rank;
}

}  // namespace
}  // namespace heavywater
