#include "cache_service/cluster/members.h"

#include <gtest/gtest.h>

#include "tests/cache_service/registry/fake_clock.h"

namespace heavywater {
namespace {

v1::ServiceRecord Service(const std::string& name) {
  v1::ServiceRecord record;
  record.set_service(name);
  return record;
}

class MembersTest : public testing::Test {
 protected:
  FakeClock clock_;
  Members members_{absl::Seconds(5), clock_};
};

TEST_F(MembersTest, NothingIsKnownBeforeEtcdHasTold) {
  EXPECT_EQ(members_.Of("a"), Members::Presence::kUnknown);
  EXPECT_EQ(members_.MissingSince("a"), absl::InfiniteFuture());
}

TEST_F(MembersTest, OneThatLeavesIsGoneAfterTheGraceAndNotBefore) {
  members_.Reset({Service("a")});
  EXPECT_EQ(members_.Of("a"), Members::Presence::kHere);
  clock_.Advance(absl::Seconds(100));
  members_.Remove("a");
  EXPECT_EQ(members_.Of("a"), Members::Presence::kMissing);
  clock_.Advance(absl::Seconds(4));
  EXPECT_EQ(members_.Of("a"), Members::Presence::kMissing);
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(members_.Of("a"), Members::Presence::kGone);
  members_.Put("a", Service("a"));
  EXPECT_EQ(members_.Of("a"), Members::Presence::kHere);
}

TEST_F(MembersTest, TheGraceBeginsAnewWhenEtcdWasAway) {
  members_.Reset({Service("a")});
  members_.Remove("a");
  clock_.Advance(absl::Seconds(60));
  members_.LoseSight();
  EXPECT_EQ(members_.Of("a"), Members::Presence::kUnknown);
  members_.Reset({});
  EXPECT_EQ(members_.Of("a"), Members::Presence::kMissing);
  EXPECT_EQ(members_.MissingSince("a"), clock_.Now());
  clock_.Advance(absl::Seconds(5));
  EXPECT_EQ(members_.Of("a"), Members::Presence::kGone);
}

}  // namespace
}  // namespace heavywater
