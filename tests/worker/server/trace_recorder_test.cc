// `record_dir`: what a group's ranks record is what the model computed, and replays.
#include "worker/server/trace_recorder.h"

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/test_group.h"
#include "worker/replay/replay.h"

namespace heavywater {
namespace {

class TraceRecorderTest : public ::testing::Test {
 protected:
  TraceRecorderTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
  }
  ~TraceRecorderTest() override { std::filesystem::remove_all(folder_); }

  ServerTestGroup::Configure Recording() const {
    return [this](v1::WorkerConfig& config) { config.set_record_dir(folder_); };
  }
  std::string PathOf(const Generated& generated, int rank) const {
    return absl::StrCat(folder_, "/seq", generated.messages[0].sequence_id(), "_rank", rank,
                        ".trace");
  }
  // Ranks write behind the answer.
  absl::StatusOr<Trace> Read(const std::string& path) const {
    for (int tries = 0; tries < 1000 && !std::filesystem::exists(path); ++tries) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    return ReadTrace(path);
  }

  const std::string folder_ = ::testing::TempDir() + "/trace_recorder_test";
  TinyModel model_;
};

TEST_F(TraceRecorderTest, EachRankWritesItsHeadsOfAllTokensThatWereTakenIn) {
  // Under the full cache: attention to the trace's rows is what the model saw.
  std::vector<float> keys;
  for (const int size : {1, 3}) {
    ServerTestGroup group(model_, size, Recording());
    group.Start();
    v1::GenerateRequest request = MakeRequest(SomeTokens(30, 7), 12);
    request.mutable_policy()->set_policy("full");
    request.set_ignore_eos(true);
    const Generated generated = group.Generate(request);
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    for (int rank = 0; rank < size; ++rank) {
      const absl::StatusOr<Trace> trace = Read(PathOf(generated, rank));
      ASSERT_TRUE(trace.ok()) << trace.status();
      EXPECT_EQ(trace->shape.num_tokens, 41);  // the last new one is given out, not taken in
      EXPECT_EQ(trace->shape.prompt_tokens, 30);
      EXPECT_EQ(trace->shape.num_kv_heads, kTinyKvHeads / size);
      // A rank of one has all heads, a rank of three the head of its number.
      const std::vector<float>& k = trace->layers[kTinyLayers - 1].k;
      if (size == 1) keys = k;
      for (int64_t token = 0; token < 41 && size > 1; ++token) {
        for (int i = 0; i < kTinyHeadDim; ++i) {
          ASSERT_NEAR(k[token * kTinyHeadDim + i],
                      keys[(token * kTinyKvHeads + rank) * kTinyHeadDim + i], 1e-4f);
        }
      }
      PolicyOptions full;
      full.policy = Policy::kFull;
      const absl::StatusOr<ReplayFigures> figures = Replay(*trace, full, {.page_tokens = 16});
      ASSERT_TRUE(figures.ok()) << figures.status();
      EXPECT_NEAR(figures->error, 0, 1e-5);
    }
  }
}

TEST_F(TraceRecorderTest, SequencesInABatchAreKeptApartAndThoseAtPlacesAreNotRecorded) {
  ServerTestGroup group(model_, 1, Recording());
  v1::GenerateRequest placed = Bounded(SomeTokens(30, 9), 8, "streaming");
  placed.mutable_policy()->set_positions("cache_relative");
  placed.set_ignore_eos(true);
  v1::GenerateRequest first = Bounded(SomeTokens(20, 7), 8);
  v1::GenerateRequest second = Bounded(SomeTokens(25, 8), 8);
  first.set_ignore_eos(true);
  second.set_ignore_eos(true);
  std::vector<std::shared_ptr<ServedGeneration>> running;
  for (const v1::GenerateRequest& request : {first, second, placed}) {
    auto started = group.engine().Start(request);
    ASSERT_TRUE(started.ok()) << started.status();
    running.push_back(*std::move(started));
  }
  group.Start();
  std::vector<Generated> generated;
  for (auto& generation : running) {
    generated.push_back(ServerTestGroup::ReadAll(*generation));
    ASSERT_TRUE(generated.back().status.ok()) << generated.back().status;
  }
  EXPECT_EQ(Read(PathOf(generated[0], 0))->shape.num_tokens, 27);
  EXPECT_EQ(Read(PathOf(generated[1], 0))->shape.num_tokens, 32);
  group.Stop();
  EXPECT_FALSE(std::filesystem::exists(PathOf(generated[2], 0)));
}

}  // namespace
}  // namespace heavywater
