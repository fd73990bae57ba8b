#include "cache_service/registry/group_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "tests/cache_service/registry/group_fixture.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(GroupRegistryTest, JoinAnswersWhenTheLastRankIsThereWithAllAddresses) {
  const PendingJoin second = Join(TestJoin(1, 3));
  const PendingJoin first = Join(TestJoin(0, 3));
  EXPECT_EQ(first->answers + second->answers, 0);
  const PendingJoin third = Join(TestJoin(2, 3));
  for (const PendingJoin& join : {first, second, third}) {
    ASSERT_TRUE(join->ok()) << join->message();
    EXPECT_EQ(join->result->epoch(), 1u);
    EXPECT_EQ(join->result->lease_ms(), 5000);
    EXPECT_EQ(join->result->heartbeat_interval_ms(), 1000);
    EXPECT_THAT(join->result->addresses(),
                ElementsAre("127.0.0.1:9000", "127.0.0.1:9001", "127.0.0.1:9002"));
  }
  EXPECT_EQ(groups_.num_ranks(), 3);
}

TEST_F(GroupRegistryTest, AJoinThatWaitsTooLongNamesTheMissingRanks) {
  const PendingJoin join = Join(TestJoin(1, 3));
  Pass(absl::Seconds(9));
  EXPECT_EQ(join->answers, 0);
  Pass(absl::Seconds(1));
  EXPECT_EQ(join->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(join->message(), HasSubstr("missing ranks 0, 2 of 3"));
  EXPECT_EQ(groups_.num_groups(), 0) << "an empty group is forgotten";
}

TEST_F(GroupRegistryTest, RanksThatDifferAllGetBothValues) {
  v1::JoinRequest other_size = TestJoin(1, 2);
  v1::JoinRequest other_dtype = TestJoin(1, 3);
  other_dtype.mutable_fingerprint()->set_dtype("fp32");
  v1::JoinRequest other_config = TestJoin(1, 3);
  other_config.set_config_digest("policy=snapkv_h2o budget=0.3");
  const struct {
    v1::JoinRequest request;
    const char* first;
    const char* second;
  } cases[] = {{other_size, "rank 1 has 2", "rank 0 has 3"},
               {other_dtype, "fingerprint.dtype: rank 1 has \"fp32\"", "rank 0 has \"bf16\""},
               {other_config, "budget=0.3", "budget=0.2"}};
  for (const auto& [request, first, second] : cases) {
    const PendingJoin waiting = Join(TestJoin(0, 3));
    const PendingJoin differing = Join(request);
    for (const PendingJoin& join : {waiting, differing}) {
      EXPECT_EQ(join->answers, 1);
      EXPECT_EQ(join->code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(join->message(), AllOf(HasSubstr(first), HasSubstr(second)));
    }
  }
}

TEST_F(GroupRegistryTest, ARetriedJoinGetsTheSameAnswerAndNoNewEpoch) {
  const Epoch epoch = Form(2);
  const PendingJoin retry = Join(TestJoin(1, 2));
  ASSERT_TRUE(retry->ok());
  EXPECT_EQ(retry->result->epoch(), epoch);
  EXPECT_TRUE(groups_.CheckRank("group", 0, epoch).ok());
}

TEST_F(GroupRegistryTest, ARestartedRankRaisesTheEpochAndTheOldOneIsAborted) {
  const Epoch epoch = Form(2);
  const PendingJoin restarted = Join(TestJoin(1, 2, "another-process"));
  EXPECT_EQ(restarted->answers, 0);
  const absl::Status old = groups_.Renew("group", 0, epoch);
  EXPECT_EQ(old.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(old.message()), HasSubstr("rank 1 joined anew"));
  const PendingJoin again = Join(TestJoin(0, 2));
  ASSERT_TRUE(restarted->ok() && again->ok());
  EXPECT_GT(again->result->epoch(), epoch);
  const absl::Status stale = groups_.Renew("group", 0, epoch);
  EXPECT_EQ(stale.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(stale.message()), AllOf(HasSubstr("epoch is 1"), HasSubstr("at 2")));
}

TEST_F(GroupRegistryTest, AStrayProcessWithAnotherConfigurationDoesNotEndAGroupThatWorks) {
  const Epoch epoch = Form(2);
  v1::JoinRequest stray = TestJoin(1, 2, "stray");
  stray.set_config_digest("other");
  EXPECT_EQ(Join(stray)->code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(groups_.CheckRank("group", 1, epoch).ok());
  // Once the leases are over the new configuration may form the group.
  Pass(absl::Seconds(6));
  const PendingJoin now = Join(stray);
  v1::JoinRequest peer = TestJoin(0, 2, "peer");
  peer.set_config_digest("other");
  ASSERT_TRUE(Join(peer)->ok());
  EXPECT_TRUE(now->ok());
}

TEST_F(GroupRegistryTest, ADeadRanksLeaseEndsAndDissolvesTheFormation) {
  const Epoch epoch = Form(2);
  Pass(absl::Seconds(3));
  ASSERT_TRUE(groups_.Renew("group", 0, epoch).ok());
  Pass(absl::Seconds(3));
  const absl::Status status = groups_.Renew("group", 0, epoch);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the lease of rank 1 ended"));
}

TEST_F(GroupRegistryTest, DissolvingEndsTheWaitsOfTheEpoch) {
  const Epoch epoch = Form(2);
  const PendingWait wait = Wait("key", epoch);
  ASSERT_TRUE(Leave(1, epoch).ok());
  EXPECT_EQ(wait->answers, 1);
  EXPECT_EQ(wait->code(), absl::StatusCode::kAborted);
}

TEST_F(GroupRegistryTest, RanksLeaveOneAfterAnother) {
  const Epoch epoch = Form(3);
  EXPECT_TRUE(Leave(0, epoch).ok());
  EXPECT_TRUE(Leave(2, epoch).ok());
  EXPECT_TRUE(Leave(1, epoch).ok());
  groups_.Tick();
  EXPECT_EQ(groups_.num_groups(), 0);
  EXPECT_EQ(Leave(1, epoch).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Form(3), epoch + 1) << "epochs are not used twice";
}

TEST_F(GroupRegistryTest, ASecondProcessOfTheSameRankReplacesTheFirst) {
  const PendingJoin first = Join(TestJoin(0, 2, "a"));
  const PendingJoin second = Join(TestJoin(0, 2, "b"));
  EXPECT_EQ(first->code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(Join(TestJoin(1, 2))->ok());
  EXPECT_TRUE(second->ok());
}

TEST_F(GroupRegistryTest, ACancelledJoinNoLongerCounts) {
  const PendingJoin join = Join(TestJoin(0, 2));
  groups_.Cancel(join->ticket);
  EXPECT_EQ(join->code(), absl::StatusCode::kCancelled);
  const PendingJoin other = Join(TestJoin(1, 2));
  EXPECT_EQ(other->answers, 0);
  EXPECT_TRUE(Join(TestJoin(0, 2))->ok());
}

TEST_F(GroupRegistryTest, AValueReachesThoseWhoWaitAndThoseWhoComeLater) {
  const Epoch epoch = Form(2);
  const PendingWait early = Wait("address", epoch);
  EXPECT_EQ(early->answers, 0);
  ASSERT_TRUE(Put("other", "x", epoch).ok());
  EXPECT_EQ(early->answers, 0);
  ASSERT_TRUE(Put("address", std::string("\0bytes", 6), epoch).ok());
  const PendingWait late = Wait("address", epoch);
  for (const PendingWait& wait : {early, late}) {
    ASSERT_TRUE(wait->ok());
    EXPECT_EQ(*wait->result, std::string("\0bytes", 6));
  }
}

TEST_F(GroupRegistryTest, AWaitThatTakesTooLongNamesTheKey) {
  const Epoch epoch = Form(2);
  const PendingWait wait = Wait("never", epoch);
  Pass(absl::Seconds(1));
  EXPECT_EQ(wait->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(wait->message(), HasSubstr("never"));
}

TEST_F(GroupRegistryTest, ValuesOfAnEarlierEpochAreGone) {
  const Epoch epoch = Form(2);
  ASSERT_TRUE(Put("key", "old", epoch).ok());
  ASSERT_TRUE(Leave(0, epoch).ok());
  const Epoch next = Form(2);
  EXPECT_EQ(Put("key", "late", epoch).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Wait("key", next)->answers, 0);
}

TEST_F(GroupRegistryTest, LimitsAreNamed) {
  const Epoch epoch = Form(1);
  const absl::Status value = Put("key", std::string(64 * 1024 + 1, 'x'), epoch);
  EXPECT_EQ(value.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(value.message()), AllOf(HasSubstr("65537"), HasSubstr("65536")));
  EXPECT_TRUE(Put("key", std::string(64 * 1024, 'x'), epoch).ok());
  EXPECT_EQ(Put("", "x", epoch).code(), absl::StatusCode::kInvalidArgument);
  absl::Status keys;
  for (int i = 0; i < 5000 && keys.ok(); ++i) keys = Put(absl::StrCat("k", i), "x", epoch);
  EXPECT_EQ(keys.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(keys.message()), HasSubstr("4096"));
  for (const char* name : {"second", "third"}) {
    v1::JoinRequest request = TestJoin(0, 1);
    request.set_group(name);
    const PendingJoin join = Join(request);
    EXPECT_EQ(join->ok(), std::string(name) == "second") << join->message();
  }
}

TEST_F(GroupRegistryTest, BadRequestsNameTheFieldAndChangeNothing) {
  const auto expect_invalid = [&](auto change, const char* field) {
    v1::JoinRequest request = TestJoin(0, 1);
    change(request);
    const PendingJoin join = Join(request);
    EXPECT_EQ(join->code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(join->message(), HasSubstr(field));
  };
  expect_invalid([](auto& r) { r.set_group(""); }, "group");
  expect_invalid([](auto& r) { r.set_size(0); }, "size");
  expect_invalid([](auto& r) { r.set_size(1 << 30); }, "size");
  expect_invalid([](auto& r) { r.set_rank(1); }, "rank");
  expect_invalid([](auto& r) { r.set_rank(-1); }, "rank");
  expect_invalid([](auto& r) { r.set_instance(""); }, "instance");
  expect_invalid([](auto& r) { r.set_timeout_ms(-1); }, "timeout_ms");
  expect_invalid([](auto& r) { r.set_config_digest(std::string(20000, 'x')); }, "config_digest");
  expect_invalid([](auto& r) { r.mutable_fingerprint()->set_dtype("int3"); }, "fingerprint.dtype");
  expect_invalid([](auto& r) { r.mutable_fingerprint()->set_num_layers(0); }, "num_layers");
  expect_invalid([](auto& r) { r.mutable_fingerprint()->set_format_version(2); }, "format_version");
  EXPECT_EQ(groups_.num_groups(), 0);
  EXPECT_EQ(groups_.Renew("nobody", 0, 1).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(groups_.Renew(std::string(129, 'x'), 0, 1).code(), absl::StatusCode::kInvalidArgument);
  const Epoch epoch = Form(2);
  EXPECT_EQ(groups_.Renew("group", 2, epoch).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(GroupRegistryTest, DrainingEndsEverythingThatWaits) {
  const PendingJoin join = Join(TestJoin(0, 2));
  groups_.FailWaiting(absl::UnavailableError("draining"));
  EXPECT_EQ(join->code(), absl::StatusCode::kUnavailable);
}

TEST_F(GroupRegistryTest, AMappedSlabIsRememberedWhileTheProcessStays) {
  const Epoch epoch = Form(2);
  ASSERT_TRUE(groups_.SetDirect("group", 0, epoch).ok());
  ASSERT_TRUE(groups_.SetDirect("group", 1, epoch).ok());
  ASSERT_TRUE(Leave(0, epoch).ok());
  const PendingJoin same = Join(TestJoin(1, 2));
  Join(TestJoin(0, 2, "another-process"));
  ASSERT_TRUE(same->ok());
  EXPECT_TRUE(groups_.IsDirect("group", 1));
  EXPECT_FALSE(groups_.IsDirect("group", 0));
}

TEST_F(GroupRegistryTest, ManyThreadsMeetAgainAndAgain) {
  constexpr int kRanks = 4;
  constexpr int kRounds = 50;
  std::vector<std::thread> ranks;
  std::atomic<int> failures = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      for (int round = 0; round < kRounds; ++round) {
        std::promise<absl::StatusOr<v1::JoinResponse>> promise;
        groups_.Join(groups_.NewTicket(), TestJoin(rank, kRanks, absl::StrCat(rank, ".", round)),
                     [&](auto result) { promise.set_value(std::move(result)); });
        const auto joined = promise.get_future().get();
        if (!joined.ok()) ++failures;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(failures, 0);
}

}  // namespace
}  // namespace heavywater
