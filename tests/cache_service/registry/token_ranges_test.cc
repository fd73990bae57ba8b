#include "cache_service/registry/token_ranges.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace heavywater {
namespace {

std::set<int64_t> Expand(const TokenRanges& ranges) {
  std::set<int64_t> positions;
  for (const auto& [begin, end] : ranges) {
    for (int64_t position = begin; position < end; ++position) positions.insert(position);
  }
  return positions;
}

TokenRanges Random(std::mt19937& random) {
  std::vector<int32_t> kept;
  for (int32_t position = 0; position < 40; ++position) {
    if (random() % 3 == 0) kept.push_back(position);
  }
  return Complement(kept, 40);
}

TEST(TokenRangesTest, ComplementHasWhatIsNotThere) {
  const std::vector<int32_t> kept = {0, 1, 5, 9};
  EXPECT_EQ(Complement(kept, 10), (TokenRanges{{2, 5}, {6, 9}}));
  EXPECT_EQ(Complement({}, 3), (TokenRanges{{0, 3}}));
  EXPECT_EQ(Complement({}, 0), TokenRanges{});
}

TEST(TokenRangesTest, SetOperationsEqualThoseOfPlainSets) {
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    const TokenRanges a = Random(random);
    const TokenRanges b = Random(random);
    const std::set<int64_t> in_a = Expand(a);
    const std::set<int64_t> in_b = Expand(b);
    std::set<int64_t> both, either = in_a, only;
    either.insert(in_b.begin(), in_b.end());
    for (const int64_t position : in_a) {
      (in_b.contains(position) ? both : only).insert(position);
    }
    ASSERT_EQ(Expand(Intersect(a, b)), both);
    ASSERT_EQ(Expand(Union(a, b)), either);
    ASSERT_EQ(Expand(Subtract(a, b)), only);
    ASSERT_EQ(CountTokens(Subtract(a, b)), static_cast<int64_t>(only.size()));
    FlatRanges flat;
    AppendFlat(a, &flat);
    ASSERT_TRUE(CheckFlatRanges("field", flat, 40).ok());
    ASSERT_EQ(FromFlat(flat), a);
  }
}

TEST(TokenRangesTest, RefusesRangesThatAreNotAscendingWithinTheEnd) {
  const auto check = [](std::initializer_list<int64_t> numbers) {
    FlatRanges flat(numbers.begin(), numbers.end());
    return CheckFlatRanges("dropped_ranges", flat, 10).ok();
  };
  EXPECT_TRUE(check({0, 3, 3, 4, 9, 10}));
  EXPECT_FALSE(check({0}));
  EXPECT_FALSE(check({-1, 3}));
  EXPECT_FALSE(check({3, 3}));
  EXPECT_FALSE(check({4, 6, 5, 7}));
  EXPECT_FALSE(check({9, 11}));
}

}  // namespace
}  // namespace heavywater
