#include "worker/server/position_reads.h"

#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

std::vector<std::pair<int32_t, int64_t>> Filled(const std::vector<int64_t>& reads) {
  v1::GenerateResponse response;
  FillReads(reads, *response.mutable_reads());
  std::vector<std::pair<int32_t, int64_t>> filled;
  for (const auto& one : response.reads()) filled.emplace_back(one.position(), one.count());
  return filled;
}

TEST(PositionReadsTest, TheMostReadComeFirstTiesToTheLowerPositionAndUnreadOnesNot) {
  EXPECT_THAT(Filled({0, 2, 5, 0, 2, 7}),
              ElementsAre(Pair(5, 7), Pair(2, 5), Pair(1, 2), Pair(4, 2)));
  EXPECT_THAT(Filled({0, 0}), IsEmpty());
  EXPECT_THAT(Filled({}), IsEmpty());
}

TEST(PositionReadsTest, OnlyTheMostReadAreTold) {
  std::vector<int64_t> reads(kMaxPositionReads + 40, 1);
  reads.back() = 3;
  const auto filled = Filled(reads);
  ASSERT_THAT(filled, SizeIs(kMaxPositionReads));
  EXPECT_THAT(filled.front(), Pair(kMaxPositionReads + 39, 3));
  EXPECT_THAT(filled.back(), Pair(kMaxPositionReads - 2, 1));
}

}  // namespace
}  // namespace heavywater
