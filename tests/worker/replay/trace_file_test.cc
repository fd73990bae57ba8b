// The trace file: what is written is read; what is damaged is told.
#include "worker/replay/trace_file.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

Trace RandomTrace(unsigned seed, KvDtype dtype) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Trace trace;
  trace.shape = {.num_layers = 2,
                 .num_query_heads = 4,
                 .num_kv_heads = 2,
                 .head_dim = 16,
                 .num_tokens = 70,
                 .prompt_tokens = 60,
                 .dtype = dtype,
                 .attention_scale = 0.25,
                 .model = "tiny/\"1\""};
  for (int layer = 0; layer < 2; ++layer) {
    TraceLayer rows;
    for (auto* part : {&rows.q, &rows.k, &rows.v}) {
      part->resize(70 * 16 * (part == &rows.q ? 4 : 2));
      for (float& x : *part) x = std::round(16 * normal(random)) / 16;  // exact in every dtype
    }
    trace.layers.push_back(std::move(rows));
  }
  return trace;
}

class TraceFileTest : public ::testing::Test {
 protected:
  ~TraceFileTest() override { std::filesystem::remove(path_); }

  std::string Bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void SetBytes(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }

  const std::string path_ = ::testing::TempDir() + "/" +
                            ::testing::UnitTest::GetInstance()->current_test_info()->name() +
                            ".trace";
};

TEST_F(TraceFileTest, WhatIsWrittenIsRead) {
  for (const KvDtype dtype : kKvDtypes) {
    const Trace trace = RandomTrace(1, dtype);
    ASSERT_TRUE(WriteTrace(path_, trace).ok());
    const absl::StatusOr<Trace> read = ReadTrace(path_);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->shape.num_tokens, 70);
    EXPECT_EQ(read->shape.prompt_tokens, 60);
    EXPECT_EQ(read->shape.attention_scale, 0.25);
    EXPECT_EQ(read->shape.model, "tiny/\"1\"");
    EXPECT_EQ(read->shape.dtype, dtype);
    for (int layer = 0; layer < 2; ++layer) {
      EXPECT_EQ(read->layers[layer].q, trace.layers[layer].q);
      EXPECT_EQ(read->layers[layer].k, trace.layers[layer].k);
      EXPECT_EQ(read->layers[layer].v, trace.layers[layer].v);
    }
  }
}

TEST_F(TraceFileTest, AFileThatIsCutOffOrGrownIsTold) {
  ASSERT_TRUE(WriteTrace(path_, RandomTrace(2, KvDtype::kBFloat16)).ok());
  const std::string whole = Bytes();
  for (const size_t bytes : {size_t{0}, size_t{7}, size_t{19}, size_t{20}, size_t{60},
                             whole.size() / 2, whole.size() - 1}) {
    SetBytes(whole.substr(0, bytes));
    EXPECT_EQ(ReadTrace(path_).status().code(), absl::StatusCode::kDataLoss) << bytes << " bytes";
  }
  SetBytes(whole + "x");
  EXPECT_THAT(std::string(ReadTrace(path_).status().message()),
              HasSubstr("has " + std::to_string(whole.size() + 1) + " bytes, want " +
                        std::to_string(whole.size())));
  std::filesystem::remove(path_);
  EXPECT_EQ(ReadTrace(path_).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TraceFileTest, EveryChangedByteIsToldAndNothingElseHappens) {
  ASSERT_TRUE(WriteTrace(path_, RandomTrace(3, KvDtype::kFloat16)).ok());
  const std::string whole = Bytes();
  std::mt19937 random(4);
  for (int i = 0; i < 400; ++i) {
    std::string changed = whole;
    // Its beginning byte by byte, the rest here and there.
    const size_t at = i < 260 ? static_cast<size_t>(i) : random() % whole.size();
    changed[at] = static_cast<char>(changed[at] ^ (1 + random() % 255));
    SetBytes(changed);
    EXPECT_FALSE(ReadTrace(path_).ok()) << "byte " << at;
  }
}

TEST_F(TraceFileTest, HeadersThatCannotBeAreRefusedByName) {
  struct Bad {
    void (*spoil)(TraceShape&);
    const char* says;
  };
  const Bad cases[] = {
      {[](TraceShape& s) { s.num_layers = 0; }, "num_layers is 0"},
      {[](TraceShape& s) { s.num_query_heads = 3; }, "num_query_heads is 3, want a multiple"},
      {[](TraceShape& s) { s.head_dim = 12; }, "head_dim is 12, want a multiple of 8"},
      {[](TraceShape& s) { s.prompt_tokens = 71; }, "prompt_tokens is 71, want 1 to 70"},
      {[](TraceShape& s) { s.num_tokens = 1 << 21; }, "num_tokens is 2097152"}};
  for (const Bad& bad : cases) {
    Trace trace = RandomTrace(5, KvDtype::kFloat32);
    bad.spoil(trace.shape);
    const absl::Status status = WriteTrace(path_, trace);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.says));
  }
}

TEST_F(TraceFileTest, NumbersThatAreNotFiniteAreNamed) {
  Trace trace = RandomTrace(6, KvDtype::kFloat32);
  trace.layers[1].k[5] = NAN;
  ASSERT_TRUE(WriteTrace(path_, trace).ok());
  const absl::Status status = ReadTrace(path_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 1: K[5] is nan"));
}

}  // namespace
}  // namespace heavywater
