// What is particular to the CPU backend: its threads and its targets.
#include <thread>

#include "tests/worker/backend/backend_test_base.h"

namespace heavywater {
namespace {

KvShape Shape(KvDtype dtype) {
  KvShape shape;
  shape.num_query_heads = 20;
  shape.num_kv_heads = 2;
  shape.head_dim = 64;
  shape.dtype = dtype;
  return shape;
}

class CpuBackendThreadsTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    auto one = CreateCpuBackend({.num_threads = 1, .target = GetParam()});
    if (absl::IsFailedPrecondition(one.status())) GTEST_SKIP() << one.status();
    one_ = std::move(*one);
    three_ = CreateCpuBackend({.num_threads = 3, .target = GetParam()}).value();
  }
  std::unique_ptr<Backend> one_;
  std::unique_ptr<Backend> three_;
};

INSTANTIATE_TEST_SUITE_P(All, CpuBackendThreadsTest, testing::Values("avx2", "avx512"));

TEST_P(CpuBackendThreadsTest, AttendYieldsTheSameBitsWithOneThreadAndWithThree) {
  for (unsigned seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    AttendCase attend = RandomAttendCase(rng, Shape(KvDtype::kBFloat16), 3);
    AttendCase::Item& last = attend.items.back();  // several blocks of slots
    last.layer = DenseLayer(rng, attend.shape, 1, 2100);
    last.first_position = 2095;
    const AttendOutcome expected = RunAttend(*one_, attend);
    for (int repeat = 0; repeat < 5; ++repeat) {
      const AttendOutcome actual = RunAttend(*three_, attend);
      ExpectSameBits(actual.out, expected.out);
      EXPECT_EQ(actual.gains, expected.gains);
    }
  }
}

TEST_P(CpuBackendThreadsTest, RecallYieldsTheSameBitsWithOneThreadAndWithThree) {
  for (const int num_kv_heads : {2, 10}) {  // groups of 10 and of 2
    std::mt19937 rng(num_kv_heads);
    KvShape shape = Shape(KvDtype::kBFloat16);
    shape.num_kv_heads = num_kv_heads;
    AttendCase attend = RandomAttendCase(rng, shape, 3);
    for (AttendCase::Item& item : attend.items) {
      item.recall = RecallOf(shape, DenseLayer(rng, shape, item.layer.num_sets, 1200), 16);
      for (uint16_t& word : item.recall->demoted) word = static_cast<uint16_t>(rng());
      for (int set = 0; set < item.layer.num_sets; ++set) {  // as far as there are positions
        for (Position position = 1200; position < 1280; ++position) {
          SetDemoted(*item.recall, set, position, false);
        }
      }
    }
    const AttendOutcome expected = RunAttend(*one_, attend);
    for (int repeat = 0; repeat < 5; ++repeat) {
      const AttendOutcome actual = RunAttend(*three_, attend);
      ExpectSameBits(actual.out, expected.out);
      EXPECT_EQ(actual.gains, expected.gains);
      for (size_t item = 0; item < attend.items.size(); ++item) {
        EXPECT_EQ(actual.recall[item].gains, expected.recall[item].gains);
        EXPECT_EQ(actual.recall[item].picks, expected.recall[item].picks);
        EXPECT_EQ(actual.recall[item].missing, expected.recall[item].missing);
      }
    }
  }
}

TEST_P(CpuBackendThreadsTest, AttendPromptYieldsTheSameBitsWithOneThreadAndWithThree) {
  std::mt19937 rng(2);
  const PromptCase prompt = RandomPromptCase(rng, Shape(KvDtype::kFloat32), 333);
  const AttendOutcome expected = RunPrompt(*one_, prompt);
  for (int repeat = 0; repeat < 5; ++repeat) {
    const AttendOutcome actual = RunPrompt(*three_, prompt);
    ExpectSameBits(actual.out, expected.out);
    EXPECT_EQ(actual.gains, expected.gains);
  }
}

TEST_P(CpuBackendThreadsTest, AttendPromptInChunksYieldsTheBitsOfTheWholePrompt) {
  std::mt19937 rng(2);
  PromptCase prompt = RandomPromptCase(rng, Shape(KvDtype::kFloat32), 333);
  const AttendOutcome expected = RunPrompt(*one_, prompt);
  prompt.chunks = {5, 100, 1, 227};
  const AttendOutcome actual = RunPrompt(*one_, prompt);
  ExpectSameBits(actual.out, expected.out);
  EXPECT_EQ(actual.gains, expected.gains);
}

TEST(CpuBackendTest, TheBestTargetIsOneOfTheTwo) {
  const auto backend = CreateCpuBackend({});
  if (absl::IsFailedPrecondition(backend.status())) GTEST_SKIP() << backend.status();
  const std::string name = (*backend)->Name();
  EXPECT_TRUE(name == "cpu-avx2" || name == "cpu-avx512") << name;
}

TEST(CpuBackendTest, OptionsThatCannotWorkAreInvalid) {
  const absl::Status target = CreateCpuBackend({.num_threads = 1, .target = "sse9"}).status();
  EXPECT_EQ(target.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(target.message().find("sse9"), std::string::npos) << target;
  const absl::Status threads = CreateCpuBackend({.num_threads = 0, .target = "best"}).status();
  EXPECT_EQ(threads.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(threads.message().find("num_threads is 0"), std::string::npos) << threads;
}

}  // namespace
}  // namespace heavywater
