#include "worker/cache/slot_table.h"

#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int32_t> Append(SlotTable& table, Position first, int64_t count) {
  std::vector<int32_t> slots;
  table.Append(first, count, slots);
  return slots;
}

TEST(SlotTableTest, NewPositionsTakeFreshSlotsInOrder) {
  SlotTable table(4);
  EXPECT_THAT(Append(table, 0, 3), ElementsAre(0, 1, 2));
  EXPECT_EQ(table.used(), 3);
  EXPECT_EQ(table.resident(), 3);
  EXPECT_TRUE(table.Fits(1));
  EXPECT_FALSE(table.Fits(2));
}

TEST(SlotTableTest, AVictimsSlotIsHandedOverInPlace) {
  SlotTable table(4);
  Append(table, 0, 4);
  table.Release(std::vector<int32_t>{2});
  EXPECT_EQ(table.resident(), 3);
  EXPECT_EQ(table.used(), 4);
  EXPECT_THAT(Append(table, 4, 1), ElementsAre(2));
  EXPECT_THAT(table.positions(), ElementsAre(0, 1, 4, 3));
}

TEST(SlotTableTest, TheLowestFreeSlotIsTakenFirstWhateverTheOrderOfRelease) {
  SlotTable table(5);
  Append(table, 0, 5);
  table.Release(std::vector<int32_t>{3, 1});
  table.Release(std::vector<int32_t>{0});
  EXPECT_THAT(Append(table, 5, 3), ElementsAre(0, 1, 3));
}

TEST(SlotTableTest, UndoRestoresWhatAppendFound) {
  SlotTable table(6);
  Append(table, 0, 4);
  table.Release(std::vector<int32_t>{1});
  const int64_t used = table.used();
  const std::vector<int32_t> slots = Append(table, 4, 3);
  EXPECT_THAT(slots, ElementsAre(1, 4, 5));
  table.Undo(slots, used);
  EXPECT_EQ(table.used(), 4);
  EXPECT_EQ(table.resident(), 3);
  EXPECT_THAT(Append(table, 4, 3), ElementsAre(1, 4, 5));
}

TEST(SlotTableTest, SlotsAreListedByPosition) {
  SlotTable table(3);
  Append(table, 0, 3);
  table.Release(std::vector<int32_t>{0});
  Append(table, 3, 1);
  EXPECT_THAT(table.SlotsByPosition(), ElementsAre(1, 2, 0));
}

TEST(SlotTableTest, ThePromptsResultFillsSlotsFromTheStart) {
  SlotTable table(4);
  table.Assign(std::vector<Position>{2, 5, 9});
  EXPECT_THAT(table.positions(), ElementsAre(2, 5, 9));
  EXPECT_THAT(Append(table, 10, 1), ElementsAre(3));
}

TEST(SlotTableTest, ShrinkMovesOnlyWhatLiesAboveTheNewCapacity) {
  SlotTable table(6);
  Append(table, 0, 6);
  table.Release(std::vector<int32_t>{1, 3, 4});
  const std::vector<SlotTable::Move> moves = table.Shrink(4);
  ASSERT_EQ(moves.size(), 1u);
  EXPECT_EQ(moves[0].from, 5);
  EXPECT_EQ(moves[0].to, 1);
  EXPECT_THAT(table.positions(), ElementsAre(0, 5, 2, kNoPosition));
  EXPECT_THAT(Append(table, 6, 1), ElementsAre(3));
}

TEST(SlotTableTest, GrowKeepsEverySlot) {
  SlotTable table(2);
  Append(table, 0, 2);
  table.Grow(4);
  EXPECT_THAT(Append(table, 2, 2), ElementsAre(2, 3));
  EXPECT_THAT(table.positions(), ElementsAre(0, 1, 2, 3));
}

TEST(SlotTableTest, TwoTablesWithTheSameCallsAreTheSame) {
  std::mt19937 random(3);
  SlotTable a(32);
  SlotTable b(32);
  Position next = 0;
  for (int round = 0; round < 300; ++round) {
    const int64_t count = 1 + random() % 3;
    if (a.Fits(count)) {
      EXPECT_EQ(Append(a, next, count), Append(b, next, count));
      next += static_cast<Position>(count);
    }
    std::vector<int32_t> victims;
    for (const int32_t slot : a.SlotsByPosition()) {
      if (random() % 4 == 0) victims.push_back(slot);
    }
    a.Release(victims);
    b.Release(std::vector<int32_t>(victims.rbegin(), victims.rend()));
    EXPECT_TRUE(std::equal(a.positions().begin(), a.positions().end(), b.positions().begin()));
    std::set<Position> distinct(a.positions().begin(), a.positions().end());
    distinct.erase(kNoPosition);
    EXPECT_EQ(static_cast<int64_t>(distinct.size()), a.resident());
  }
}

}  // namespace
}  // namespace heavywater
