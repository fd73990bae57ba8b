#include "worker/server/split_report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

constexpr size_t kMaxBytes = 1 << 20;

v1::PlanReport Small() {
  v1::PlanReport report;
  report.set_sequence_id(7);
  report.set_plan(3);
  report.set_tokens_seen(900'000);
  report.set_hash(99);
  report.set_watermark(17);
  report.add_dropped_ranges(5);
  report.add_dropped_ranges(9);
  report.set_finished(true);
  return report;
}

v1::PlanReport Large() {
  v1::PlanReport report = Small();
  report.set_first_token(4);
  for (int i = 0; i < 250'000; ++i) report.add_tokens(i);
  for (const int size : {3, 70'000, 0, 20'000, 90'000}) {
    v1::ReportedSet& set = *report.add_sets();
    set.set_layer(report.sets_size() - 1);
    set.set_kv_head(-1);
    for (int i = 0; i < size; ++i) {
      set.add_positions(2 * i);
      set.add_scores(-i);
    }
  }
  return report;
}

TEST(SplitReportTest, WhatFitsStaysWhole) {
  const auto parts = SplitReport(Small(), kMaxBytes);
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].SerializeAsString(), Small().SerializeAsString());
}

TEST(SplitReportTest, ThePartsTogetherSayTheSameAndEachFits) {
  const v1::PlanReport whole = Large();
  v1::PlanReport joined = Small();
  joined.set_first_token(4);
  const auto parts = SplitReport(whole, kMaxBytes);
  for (const v1::PlanReport& part : parts) {
    EXPECT_LE(part.ByteSizeLong(), kMaxBytes);
    EXPECT_EQ(part.plan(), 3);
    EXPECT_EQ(part.hash(), 99u);
    EXPECT_EQ(part.watermark(), 17);
    EXPECT_EQ(part.dropped_ranges_size(), 2);
    EXPECT_EQ(part.finished(), &part == &parts.back());
    EXPECT_EQ(part.first_token(), part.tokens().empty() ? 0 : 4 + joined.tokens_size());
    joined.mutable_tokens()->MergeFrom(part.tokens());
    for (const v1::ReportedSet& piece : part.sets()) {
      if (piece.first_index() == 0) joined.add_sets();
      v1::ReportedSet& set = *joined.mutable_sets()->rbegin();
      EXPECT_EQ(piece.first_index(), set.positions_size());
      EXPECT_EQ(piece.num_positions(), whole.sets(joined.sets_size() - 1).positions_size());
      set.set_layer(piece.layer());
      set.set_kv_head(piece.kv_head());
      set.mutable_positions()->MergeFrom(piece.positions());
      set.mutable_scores()->MergeFrom(piece.scores());
    }
  }
  EXPECT_EQ(joined.SerializeAsString(), whole.SerializeAsString());
}

}  // namespace
}  // namespace heavywater
