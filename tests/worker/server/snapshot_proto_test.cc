#include "worker/server/snapshot_proto.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "heavywater/v1/snapshot.pb.h"

namespace heavywater {
namespace {

SequenceSnapshot Snapshot(bool with_slots) {
  SequenceSnapshot snapshot;
  snapshot.tokens_seen = 70;
  snapshot.plans = 9;
  snapshot.queries_since_plan = 2;
  RecallSnapshot recall;
  recall.sketched_tokens = 64;
  recall.clock = 33;
  recall.channels = {std::byte{1}, std::byte{0}, std::byte{255}};
  LedgerSnapshot ledger;
  ledger.unreported = {{1, {5, 77}}};
  if (with_slots) {
    snapshot.slots = {{{4, kNoPosition, 69}, {int64_t{1} << 40, 0, 3}}, {{1, 2, 3}, {}}};
    ledger.stride = 2;
    ledger.scores = {-5, int64_t{1} << 50};
    ledger.clocks = {3, 4};
  }
  recall.ledgers = {ledger};
  recall.reads = 8;
  snapshot.recall = std::move(recall);
  return snapshot;
}

TEST(SnapshotProtoTest, ComesBackAsItWas) {
  const std::string bytes = SerializeSnapshot(Snapshot(true));
  const auto parsed = ParseSnapshot(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->tokens_seen, 70);
  EXPECT_EQ(parsed->slots[0].positions, (std::vector<Position>{4, kNoPosition, 69}));
  EXPECT_EQ(parsed->slots[0].scores[0], int64_t{1} << 40);
  EXPECT_TRUE(parsed->slots[1].scores.empty());
  EXPECT_EQ(parsed->recall->channels[2], std::byte{255});
  EXPECT_EQ(parsed->recall->ledgers[0].unreported[0].gain, (PositionGain{5, 77}));
  EXPECT_EQ(SerializeSnapshot(*parsed), bytes);
}

TEST(SnapshotProtoTest, ARankTakesWhatAllHoldAlikeFromAnother) {
  const auto joined = JoinSnapshots(Snapshot(false), Snapshot(true));
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(SerializeSnapshot(*joined), SerializeSnapshot(Snapshot(true)));
}

TEST(SnapshotProtoTest, StatesThatDifferAreNotJoined) {
  SequenceSnapshot later = Snapshot(true);
  later.tokens_seen = 71;
  EXPECT_EQ(JoinSnapshots(Snapshot(false), later).status().code(), absl::StatusCode::kDataLoss);
  SequenceSnapshot without = Snapshot(true);
  without.recall.reset();
  EXPECT_EQ(JoinSnapshots(Snapshot(false), without).status().code(), absl::StatusCode::kDataLoss);
}

TEST(SnapshotProtoTest, BytesThatAreNoneAreDataLoss) {
  EXPECT_EQ(ParseSnapshot("\xff\xff").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ParseSnapshot("").status().code(), absl::StatusCode::kDataLoss) << "no version";
}

TEST(SnapshotProtoTest, AStateOfTheVersionBeforeOrAfterIsRefusedNamingBoth) {
  v1::SequenceSnapshot proto;
  ASSERT_TRUE(proto.ParseFromString(SerializeSnapshot(Snapshot(true))));
  const int version = proto.format_version();
  for (const int other : {version - 1, version + 1}) {
    proto.set_format_version(other);
    const absl::Status refused = ParseSnapshot(proto.SerializeAsString()).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(refused.message(),
              absl::StrCat("snapshot has format_version ", other, ", want ", version));
  }
}

}  // namespace
}  // namespace heavywater
