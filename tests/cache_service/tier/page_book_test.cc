#include "cache_service/tier/page_book.h"

#include <gtest/gtest.h>

#include "cache_service/tier/stored_page.h"
#include "tests/cache_service/tier/lower_tier_conformance.h"

namespace heavywater {
namespace {

TEST(PageBookTest, APageTakesRoomOnceAndGivesItBackOnce) {
  PageBook book("disk", 3 * StoredBytes(1000));
  EXPECT_TRUE(*book.Add(TestKey(1, 0), 1000));
  EXPECT_FALSE(*book.Add(TestKey(1, 0), 1000));
  EXPECT_EQ(book.Stats().used_bytes, StoredBytes(1000));
  book.Remove(TestKey(1, 0));
  book.Remove(TestKey(1, 0));
  EXPECT_EQ(book.Stats().used_bytes, 0);
  EXPECT_EQ(book.Stats().pages, 0);
}

TEST(PageBookTest, KeysComeBackAsTheyWere) {
  PageBook book("disk", 1 << 20);
  const PageKey key = TestKey(uint64_t{1} << 60, (int64_t{1} << 43) - 1, 1023, 1022);
  ASSERT_TRUE(book.Add(key, 1000).ok());
  const std::vector<PageKey> keys = book.KeysOf(key.sequence, 10);
  ASSERT_EQ(keys.size(), 1u);
  EXPECT_EQ(keys[0], key);
  EXPECT_TRUE(book.KeysOf(2, 10).empty());
}

TEST(PageBookTest, PagesOverALowerLimitAreLeftOutAfterARestart) {
  PageBook book("disk", 2 * StoredBytes(1000));
  const StoredPage pages[] = {{TestKey(1, 0), 1000}, {TestKey(1, 1), 1000}, {TestKey(2, 0), 1000}};
  const auto left_out = book.Restore(pages);
  ASSERT_TRUE(left_out.ok()) << left_out.status();
  ASSERT_EQ(left_out->size(), 1u);
  EXPECT_EQ(left_out->front(), TestKey(2, 0));
  EXPECT_EQ(book.Stats().pages, 2);
  PageKey other = TestKey(1, 2);
  ++other.fingerprint;
  const StoredPage other_fingerprint = {other, 1};
  EXPECT_EQ(book.Restore({&other_fingerprint, 1}).status().code(), absl::StatusCode::kDataLoss);
}

TEST(PageBookTest, PagesOfASequenceMayHaveSeveralSizesAndAReplacedOneTakesItsOwn) {
  PageBook book("disk", StoredBytes(1000) + StoredBytes(500));
  ASSERT_TRUE(book.Add(TestKey(1, 0), 1000).ok());
  ASSERT_TRUE(*book.Add(TestKey(1, 1), 500));
  EXPECT_EQ(book.Stats().free_bytes, 0);
  EXPECT_EQ(book.Add(TestKey(1, 1), 600).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(*book.Add(TestKey(1, 0), 400));
  EXPECT_EQ(book.Stats().used_bytes, StoredBytes(400) + StoredBytes(500));
  EXPECT_EQ(book.Stats().pages, 2);
  book.Remove(TestKey(1, 0));
  book.Remove(TestKey(1, 1));
  EXPECT_EQ(book.Stats().used_bytes, 0);
}

TEST(PageBookTest, NoMoreKeysThanAskedFor) {
  PageBook book("disk", 1 << 20);
  for (int64_t page = 0; page < 10; ++page) ASSERT_TRUE(book.Add(TestKey(1, page), 1000).ok());
  EXPECT_EQ(book.KeysOf(1, 4).size(), 4u);
}

TEST(StoredPageTest, KeysSortBySequenceLayerHeadAndPage) {
  EXPECT_EQ(static_cast<int64_t>(StoredKey(TestKey(1, 0)).size()), kStoredKeyBytes);
  EXPECT_LT(StoredKey(TestKey(1, 300)), StoredKey(TestKey(2, 0)));
  EXPECT_LT(StoredKey(TestKey(1, 255)), StoredKey(TestKey(1, 256)));
  EXPECT_LT(StoredKey(TestKey(1, 256)), StoredKey(TestKey(1, 0, 0, 1)));
  EXPECT_LT(StoredKey(TestKey(1, 0, 0, 1)), StoredKey(TestKey(1, 0, 1, 0)));
}

}  // namespace
}  // namespace heavywater
