#include "worker/model/rank_shard.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

TEST(SplitInUnitsTest, PartsCoverEverythingInOrderAndDifferByAtMostOneUnit) {
  for (const int64_t total : {1, 31, 32, 100, 1536, 49152, 49155}) {
    for (const int parts : {1, 2, 3, 7}) {
      int64_t next = 0;
      const int64_t longest = SplitInUnits(total, 0, parts).size;
      for (int part = 0; part < parts; ++part) {
        const Range range = SplitInUnits(total, part, parts);
        EXPECT_EQ(range.begin, next);
        EXPECT_TRUE(range.size == 0 || range.begin % 32 == 0);
        EXPECT_LE(range.size, longest);
        EXPECT_GT(range.size + 64, longest);
        next += range.size;
      }
      EXPECT_EQ(next, total) << parts << " parts";
    }
  }
}

ModelConfig SmolLm() {
  ModelConfig config;
  config.num_layers = 30;
  config.hidden_size = 576;
  config.num_query_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 64;
  config.ffn_size = 1536;
  config.vocab_size = 49152;
  return config;
}

TEST(RankShardTest, ARankHasTheQueryHeadsThatReadItsKvHeads) {
  const auto shard = MakeRankShard(SmolLm(), 1, 3);
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_EQ(shard->kv_heads.begin, 1);
  EXPECT_EQ(shard->kv_heads.size, 1);
  EXPECT_EQ(shard->query_heads.begin, 3);
  EXPECT_EQ(shard->query_heads.size, 3);
  EXPECT_EQ(shard->ffn.begin, 512);
  EXPECT_EQ(shard->vocab.size, 16384);
  EXPECT_EQ(shard->max_vocab, 16384);

  const KvShape shape = MakeKvShape(SmolLm(), *shard, {.dtype = KvDtype::kFloat32});
  EXPECT_EQ(shape.num_layers, 30);
  EXPECT_EQ(shape.num_query_heads, 3);
  EXPECT_EQ(shape.num_kv_heads, 1);
  EXPECT_EQ(shape.first_kv_head, 1);
  EXPECT_EQ(shape.total_kv_heads, 3);
  EXPECT_EQ(shape.total_query_heads, 9);
  EXPECT_EQ(shape.head_dim, 64);
  EXPECT_EQ(shape.dtype, KvDtype::kFloat32);
}

TEST(RankShardTest, WithMoreRanksThanKvHeadsSeveralShareOne) {
  int64_t next_query_head = 0;
  for (int rank = 0; rank < 9; ++rank) {
    const auto shard = MakeRankShard(SmolLm(), rank, 9);
    ASSERT_TRUE(shard.ok()) << shard.status();
    EXPECT_EQ(shard->kv_heads.begin, rank / 3);
    EXPECT_EQ(shard->kv_heads.size, 1);
    EXPECT_EQ(shard->query_heads.begin, next_query_head++);
    EXPECT_EQ(shard->query_heads.size, 1);
    EXPECT_EQ(shard->ffn.size, rank < 3 ? 192 : 160) << "48 units over 9 ranks";
  }
}

TEST(RankShardTest, RefusesSizesThatDoNotFitTheHeadsNamingBoth) {
  for (const int size : {2, 6, 27}) {
    const auto shard = MakeRankShard(SmolLm(), 0, size);
    EXPECT_EQ(shard.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(shard.status().message(), HasSubstr(std::to_string(size) + " ranks"));
    EXPECT_THAT(shard.status().message(), HasSubstr("9 query heads"));
  }
  ModelConfig config = SmolLm();
  config.num_query_heads = 24;
  config.num_kv_heads = 6;
  const auto shard = MakeRankShard(config, 0, 4);
  EXPECT_EQ(shard.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(shard.status().message(), HasSubstr("4 ranks"));
  EXPECT_THAT(shard.status().message(), HasSubstr("6 KV heads"));
  EXPECT_FALSE(MakeRankShard(SmolLm(), 3, 3).ok());
  EXPECT_FALSE(MakeRankShard(SmolLm(), -1, 3).ok());
}

}  // namespace
}  // namespace heavywater
