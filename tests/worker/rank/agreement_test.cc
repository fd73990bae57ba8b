#include "worker/rank/agreement.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

// Ranks' own entries, summed as the reduce does it.
std::vector<Agreement> Exchange(const std::vector<std::vector<int64_t>>& fields_of_rank) {
  const int world = static_cast<int>(fields_of_rank.size());
  const auto num_fields = static_cast<int64_t>(fields_of_rank[0].size());
  std::vector<Agreement> ranks;
  std::vector<int64_t> sum(world * num_fields);
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back(rank, world, num_fields);
    for (int64_t field = 0; field < num_fields; ++field) {
      ranks.back().Set(field, fields_of_rank[rank][field]);
    }
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += ranks.back().entries()[i];
  }
  for (Agreement& rank : ranks) std::copy(sum.begin(), sum.end(), rank.entries().begin());
  return ranks;
}

TEST(AgreementTest, EveryRankSeesTheEntriesOfAll) {
  for (const Agreement& rank : Exchange({{1, -5}, {2, 7}, {3, 0}})) {
    EXPECT_EQ(rank.Get(0, 1), 2);
    EXPECT_EQ(rank.Get(1, 0), -5);
    EXPECT_EQ(rank.Get(1, 2), 0);
  }
}

TEST(AgreementTest, ADifferenceNamesBothValuesAndRanksOnEveryRank) {
  for (const Agreement& rank : Exchange({{4}, {4}, {6}})) {
    const absl::Status status = rank.CheckEqual(0, "length");
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("length is 4 on rank 0 and 6 on rank 2"));
  }
  EXPECT_TRUE(Exchange({{4}, {4}})[0].CheckEqual(0, "length").ok());
}

TEST(AgreementTest, GroupsOfRanksAreComparedEachByItself) {
  const std::vector<Agreement> ranks = Exchange({{1}, {1}, {2}, {3}});
  const absl::Status status = ranks[0].CheckEqual(0, /*group=*/2, "hash");
  EXPECT_THAT(std::string(status.message()), HasSubstr("hash is 2 on rank 2 and 3 on rank 3"));
  EXPECT_TRUE(ranks[0].CheckEqual(0, /*group=*/1, "hash").ok());
}

TEST(AgreementTest, AStatusIsTheRanksOwnOrNamesTheRankThatFailed) {
  const std::vector<Agreement> ranks = Exchange({{0}, {8}, {0}});
  const absl::Status own = absl::ResourceExhaustedError("no room");
  EXPECT_EQ(ranks[1].CheckStatus(0, own), own);
  const absl::Status other = ranks[2].CheckStatus(0, absl::OkStatus());
  EXPECT_EQ(other.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(other.message()), HasSubstr("rank 1 reports RESOURCE_EXHAUSTED"));
  EXPECT_TRUE(ranks[0].AnySet(0));
  EXPECT_FALSE(Exchange({{0}, {0}})[0].AnySet(0));
}

TEST(AgreementTest, AnUnknownCodeIsStillAnError) {
  for (int64_t code : {int64_t{999}, int64_t{-1}}) {
    EXPECT_EQ(Exchange({{code}, {0}})[1].CheckStatus(0, absl::OkStatus()).code(),
              absl::StatusCode::kUnknown);
  }
}

}  // namespace
}  // namespace heavywater
