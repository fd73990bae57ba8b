#include "cache_service/registry/prefix_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

using Scope = PrefixIndex::Scope;
constexpr int kPage = 4;

std::vector<int32_t> Tokens(int first, int count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// The first `same` of Tokens(0, ...), then others.
std::vector<int32_t> Branch(int same, int count, int other) {
  std::vector<int32_t> tokens = Tokens(0, same);
  for (int i = same; i < count; ++i) tokens.push_back(other);
  return tokens;
}

std::vector<std::pair<SequenceId, int64_t>> Find(const PrefixIndex& index,
                                                 const std::vector<int32_t>& tokens,
                                                 size_t most = 8, Scope scope = {"a", 1, kPage}) {
  std::vector<std::pair<SequenceId, int64_t>> found;
  for (const auto& match : index.Find(scope, tokens, most)) {
    found.emplace_back(match.sequence, match.pages);
  }
  return found;
}

TEST(PrefixIndexTest, TheLongestCommonPrefixComesFirstAndThenTheNewest) {
  PrefixIndex index(100);
  const Scope scope = {"a", 1, kPage};
  index.Add(1, scope, Tokens(0, 17));
  index.Add(2, scope, Branch(9, 20, 77));
  index.Add(3, scope, Branch(9, 20, 88));
  EXPECT_THAT(Find(index, Tokens(0, 16)), ElementsAre(Pair(1, 4), Pair(3, 2), Pair(2, 2)));
  EXPECT_THAT(Find(index, Tokens(0, 15)), ElementsAre(Pair(1, 3), Pair(3, 2), Pair(2, 2)));
  EXPECT_THAT(Find(index, Branch(9, 20, 77), 1), ElementsAre(Pair(2, 5)));
  EXPECT_THAT(Find(index, Tokens(0, 3)), IsEmpty());
  EXPECT_THAT(Find(index, Tokens(1, 16)), IsEmpty());
}

TEST(PrefixIndexTest, OnlyTheSameTenantAndFingerprintAreFound) {
  PrefixIndex index(100);
  index.Add(1, {"a", 1, kPage}, Tokens(0, 8));
  EXPECT_THAT(Find(index, Tokens(0, 8), 8, {"b", 1, kPage}), IsEmpty());
  EXPECT_THAT(Find(index, Tokens(0, 8), 8, {"a", 2, kPage}), IsEmpty());
  EXPECT_THAT(Find(index, Tokens(0, 8), 8, {"a", 1, kPage}), ElementsAre(Pair(1, 2)));
}

TEST(PrefixIndexTest, WhatIsRemovedIsNotFoundAndLeavesNothing) {
  PrefixIndex index(100);
  const Scope scope = {"a", 1, kPage};
  index.Add(1, scope, Tokens(0, 16));
  index.Add(1, scope, Tokens(0, 16));
  index.Add(2, scope, Tokens(0, 8));
  EXPECT_EQ(index.num_pages(), 6);
  index.Remove(1);
  index.Remove(1);
  EXPECT_THAT(Find(index, Tokens(0, 16)), ElementsAre(Pair(2, 2)));
  index.Remove(2);
  EXPECT_EQ(index.num_pages(), 0);
}

TEST(PrefixIndexTest, BeyondTheLimitTheOldestAreForgotten) {
  PrefixIndex index(6);
  const Scope scope = {"a", 1, kPage};
  index.Add(1, scope, Tokens(0, 16));
  index.Add(2, scope, Tokens(100, 8));
  EXPECT_EQ(index.num_pages(), 6);
  index.Add(3, scope, Tokens(200, 4));
  EXPECT_EQ(index.num_pages(), 3);
  EXPECT_THAT(Find(index, Tokens(0, 16)), IsEmpty());
  index.Add(4, scope, Tokens(300, 28));
  EXPECT_EQ(index.num_pages(), 3) << "more than all may have: it is left out";
  EXPECT_THAT(Find(index, Tokens(100, 8)), ElementsAre(Pair(2, 2)));
}

}  // namespace
}  // namespace heavywater
