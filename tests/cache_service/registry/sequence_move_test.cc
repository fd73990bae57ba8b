// Sequences from one registry to another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "cache_service/registry/layout.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;

constexpr int64_t kTokens = 24;

// A registry with a group of one rank.
struct Side {
  explicit Side(RegistryOptions options, const std::string& group = "group")
      : store(*Slab::Create("", 1 << 20)), registry(WithChanges(std::move(options)), store, clock) {
    v1::JoinRequest join = TestJoin(0, 1);
    join.set_group(group);
    registry.groups().Join(registry.groups().NewTicket(), join,
                           [this](absl::StatusOr<v1::JoinResponse> joined) {
                             ASSERT_TRUE(joined.ok());
                             epoch = joined->epoch();
                           });
  }
  RegistryOptions WithChanges(RegistryOptions options) {
    options.on_change = [this](uint64_t id) { changed.push_back(id); };
    return options;
  }
  SequenceId Open(const std::string& request_id) {
    const auto opened = registry.Open(TestOpen(request_id, epoch));
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? opened->sequence_id() : 0;
  }
  SequenceId Suspended(const std::string& request_id) {
    const SequenceId id = Open(request_id);
    v1::ReportPlanRequest report = TestFinished(epoch, id, kTokens);
    AddTestState(kTokens, *report.mutable_reports(0));
    EXPECT_TRUE(registry.ReportPlan(report).ok());
    v1::SuspendSequenceRequest suspend;
    suspend.set_sequence_id(id);
    EXPECT_TRUE(registry.sequences().Suspend(suspend).ok());
    return id;
  }
  void OpenPages(SequenceId id) {
    const v1::Fingerprint fingerprint = TestFingerprint();
    ASSERT_TRUE(store
                    .Open({.sequence = id,
                           .fingerprint = FingerprintIdOf(fingerprint),
                           .geometry = *GeometryOf(fingerprint),
                           .max_tokens = 1000})
                    .ok());
  }

  FakeClock clock;
  HostPageStore store;
  std::vector<SequenceId> changed;
  Registry registry;
  Epoch epoch = 0;
};

TEST(SequenceMoveTest, AnImportedSequenceIsAsItWasAndAnyGroupOfItsShapeGoesOnWithIt) {
  Side from({.first_sequence_id = 100, .first_epoch = 100});
  Side to({.first_sequence_id = 1}, "another-group");
  const SequenceId id = from.Suspended("request");
  const auto exported = from.registry.sequences().Export(id, /*with_state=*/true);
  ASSERT_TRUE(exported.has_value());
  EXPECT_TRUE(exported->suspended && exported->finished && exported->can_go_on);
  to.OpenPages(id);
  const absl::Time lease_end = to.clock.Now() + absl::Minutes(3);
  ASSERT_TRUE(to.registry.sequences().Import(id, exported->state, lease_end).ok());
  EXPECT_EQ(to.registry.sequences().Import(id, exported->state, lease_end).code(),
            absl::StatusCode::kAlreadyExists);
  const auto sequence = to.registry.sequences().Get(id);
  ASSERT_TRUE(sequence.ok());
  EXPECT_TRUE(sequence->suspended() && sequence->finished());
  EXPECT_EQ(sequence->num_tokens(), kTokens);
  EXPECT_EQ(sequence->tokens(3), 103);
  EXPECT_EQ(sequence->lease_remaining_ms(), 180'000);
  EXPECT_THAT(to.changed, Contains(id));

  v1::ReopenSequenceRequest reopen = TestReopen(TestOpen("request", to.epoch), id, to.epoch);
  reopen.set_group("another-group");
  reopen.set_max_tokens_seen(kTokens);
  for (int32_t token = 0; token < kTokens; ++token) reopen.add_tokens(100 + token);
  const auto reopened = to.registry.Reopen(reopen);
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_EQ(reopened->tokens_seen(), kTokens);
  EXPECT_EQ(to.registry.sequences().Get(id)->group(), "another-group");
  // From now on it is that group's.
  reopen.set_group("group");
  EXPECT_FALSE(to.registry.Reopen(reopen).ok());
}

TEST(SequenceMoveTest, ADamagedStateLeavesNothingBehind) {
  Side from({.first_sequence_id = 100});
  Side to({});
  const SequenceId id = from.Suspended("request");
  v1::SequenceState state = from.registry.sequences().Export(id, /*with_state=*/true)->state;
  state.mutable_plans()->clear_ranks();
  EXPECT_EQ(to.registry.sequences().Import(id, state, to.clock.Now()).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_FALSE(to.registry.sequences().Export(id, /*with_state=*/false).has_value());
  EXPECT_EQ(to.registry.sequences().snapshot_bytes(), 0);
}

TEST(SequenceMoveTest, WhatIsGivenUpEndsAndItsPagesWithIt) {
  Side side({});
  const SequenceId id = side.Suspended("request");
  EXPECT_TRUE(side.registry.sequences().GiveUp(id));
  EXPECT_FALSE(side.registry.sequences().GiveUp(id));
  EXPECT_EQ(side.registry.sequences().Get(id).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(side.store.SequenceBytes(id), 0);
}

TEST(SequenceMoveTest, IdsAreOfTheServicesSlotAndPassOverImportedOnes) {
  Side a({.first_sequence_id = 1000, .id_slot = 3, .id_stride = 8});
  Side b({.first_sequence_id = 1000, .id_slot = 4, .id_stride = 8});
  const std::vector<SequenceId> of_a = {a.Open("1"), a.Open("2"), a.Open("3")};
  EXPECT_THAT(of_a, ElementsAre(1003, 1011, 1019));
  EXPECT_EQ(b.Open("1"), 1004u);
  // One of b's own numbers, which an earlier process of its slot gave out.
  Side earlier({.first_sequence_id = 1012, .id_slot = 4, .id_stride = 8});
  const SequenceId imported = earlier.Suspended("old");
  ASSERT_EQ(imported, 1012u);
  const auto exported = earlier.registry.sequences().Export(imported, /*with_state=*/true);
  b.OpenPages(imported);
  ASSERT_TRUE(b.registry.sequences().Import(imported, exported->state, b.clock.Now()).ok());
  EXPECT_EQ(b.Open("2"), 1020u);
}

TEST(SequenceMoveTest, OthersHearOfBeginningSuspensionAndEnd) {
  Side side({});
  const SequenceId id = side.Open("request");
  EXPECT_THAT(side.changed, ElementsAre(id));
  side.changed.clear();
  v1::ReportPlanRequest report = TestFinished(side.epoch, id, kTokens);
  AddTestState(kTokens, *report.mutable_reports(0));
  ASSERT_TRUE(side.registry.ReportPlan(report).ok());
  EXPECT_THAT(side.changed, ElementsAre(id));
  side.changed.clear();
  v1::SuspendSequenceRequest suspend;
  suspend.set_sequence_id(id);
  ASSERT_TRUE(side.registry.sequences().Suspend(suspend).ok());
  EXPECT_THAT(side.changed, ElementsAre(id));
  side.changed.clear();
  v1::CloseSequenceRequest close;
  close.set_sequence_id(id);
  ASSERT_TRUE(side.registry.sequences().Close(close).ok());
  EXPECT_THAT(side.changed, ElementsAre(id));
}

}  // namespace
}  // namespace heavywater
