// What happens when the host tier has no room left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache_service/base/shortage.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kUnit = 4096;

// One rank, which the store has room for 40 pages of. A prompt of 64 tokens takes
// 16 pages, a sequence one unit more.
class SequenceReclaimTest : public ::testing::Test {
 protected:
  SequenceReclaimTest() {
    registry_.groups().Join(registry_.groups().NewTicket(), TestJoin(0, 1),
                            [this](absl::StatusOr<v1::JoinResponse> joined) {
                              ASSERT_TRUE(joined.ok()) << joined.status();
                              epoch_ = joined->epoch();
                            });
  }

  absl::StatusOr<SequenceId> Open(int64_t prompt_tokens = 64) {
    v1::OpenSequenceRequest request = TestOpen(absl::StrCat("request-", ++opened_), epoch_);
    request.set_prompt_tokens(prompt_tokens);
    const auto opened = registry_.Open(request);
    if (!opened.ok()) return opened.status();
    return opened->sequence_id();
  }
  // With its pages written, and time gone by.
  SequenceId OpenAndWrite() {
    const auto id = Open();
    EXPECT_TRUE(id.ok()) << id.status();
    EXPECT_TRUE(store_
                    .Reserve({.sequence = *id, .heads = {0, 2}, .first_page = 0, .num_pages = 4},
                             /*direct=*/true)
                    .ok());
    clock_.Advance(absl::Milliseconds(10));
    return *id;
  }
  SequenceId OpenAndFinish() {
    const SequenceId id = OpenAndWrite();
    EXPECT_TRUE(registry_.ReportPlan(TestFinished(epoch_, id, 64)).ok());
    clock_.Advance(absl::Milliseconds(10));
    return id;
  }
  bool IsThere(SequenceId id) { return registry_.sequences().FindOwner(id).ok(); }
  // Two finished ones that a process which was replaced may still write to, and no more room.
  void ExpectOnlyWhoHasStoppedEnds() {
    const SequenceId first = OpenAndFinish();
    const SequenceId second = OpenAndFinish();
    for (const SequenceId id : {first, second}) {
      ASSERT_TRUE(store_.Reserve({.sequence = id, .heads = {0, 2}, .num_pages = 4}, true).ok());
    }
    EXPECT_EQ(Open().status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(IsThere(first) && IsThere(second));
    store_.StopWriter(second, 0);
    ASSERT_TRUE(Open().ok());
    EXPECT_TRUE(IsThere(first)) << "in vain";
    EXPECT_FALSE(IsThere(second));
  }

  FakeClock clock_;
  HostPageStore store_{*Slab::Create("", 40 * kUnit)};
  Registry registry_{RegistryOptions{.max_sequences = 5}, store_, clock_};
  Epoch epoch_ = 0;
  int opened_ = 0;
};

TEST_F(SequenceReclaimTest, TheLongestUnusedFinishedSequenceGivesWay) {
  const SequenceId first = OpenAndFinish();
  const SequenceId second = OpenAndFinish();
  const auto third = Open();
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_FALSE(IsThere(first));
  EXPECT_TRUE(IsThere(second)) << "no more than was needed";
  EXPECT_EQ(registry_.sequences().num_reclaimed(), 1);
}

TEST_F(SequenceReclaimTest, AReadMakesASequenceWarm) {
  const SequenceId first = OpenAndFinish();
  const SequenceId second = OpenAndFinish();
  registry_.sequences().NoteUse(first);
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(IsThere(first));
  EXPECT_FALSE(IsThere(second));
}

TEST_F(SequenceReclaimTest, WhoeverAsksForAnEndedOneLearnsWhy) {
  const SequenceId first = OpenAndFinish();
  OpenAndFinish();
  ASSERT_TRUE(Open().ok());
  const absl::Status status = registry_.sequences().Get(first).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("make room"));
  EXPECT_EQ(registry_.sequences()
                .GetSets([&] {
                  v1::GetSetsRequest request;
                  request.set_sequence_id(first);
                  return request;
                }())
                .status(),
            status);
}

TEST_F(SequenceReclaimTest, WhatIsBeingWrittenStaysAndTheRefusalSaysWhatHoldsTheRoom) {
  const SequenceId writing = OpenAndWrite();
  const SequenceId also = OpenAndWrite();
  const absl::Status status = Open().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(absl::StrCat("need ", 17 * kUnit)),
                    HasSubstr(absl::StrCat("of ", 40 * kUnit)),
                    HasSubstr(absl::StrCat("2 sequences that are being written hold ", 32 * kUnit)),
                    HasSubstr("0 finished ones 0")));
  EXPECT_TRUE(IsThere(writing) && IsThere(also));
  const auto shortage = ShortageOf(status);
  ASSERT_TRUE(shortage.has_value());
  EXPECT_EQ(shortage->need, 17 * kUnit);
  EXPECT_EQ(shortage->limit, 40 * kUnit);
  EXPECT_LT(shortage->retry_after, absl::InfiniteDuration());
}

TEST_F(SequenceReclaimTest, NothingIsEndedForWhatDoesNotFitEvenSo) {
  const SequenceId finished = OpenAndFinish();
  OpenAndWrite();
  const absl::Status status = Open(/*prompt_tokens=*/160).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("1 finished ones ", 16 * kUnit)));
  EXPECT_TRUE(IsThere(finished));
  EXPECT_EQ(registry_.sequences().num_reclaimed(), 0);
}

TEST_F(SequenceReclaimTest, AReservationMakesRoomToo) {
  const SequenceId finished = OpenAndFinish();
  const SequenceId writing = OpenAndWrite();
  const PageRange more = {.sequence = writing, .heads = {0, 2}, .first_page = 4, .num_pages = 4};
  const absl::Status full = store_.Reserve(more, true).status();
  ASSERT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(registry_.sequences().MakeRoom(full).ok());
  EXPECT_FALSE(IsThere(finished));
  EXPECT_TRUE(store_.Reserve(more, true).ok());
}

TEST_F(SequenceReclaimTest, NoneIsEndedWhosePagesWouldStayUntilItsWritersHaveStopped) {
  ExpectOnlyWhoHasStoppedEnds();
}

TEST_F(SequenceReclaimTest, AQuotaEndsNoneThatWouldStayInItEither) {
  store_.tenants().SetLimits("", TenantLimits{.host_bytes = 34 * kUnit});
  ExpectOnlyWhoHasStoppedEnds();
}

TEST_F(SequenceReclaimTest, TheNumberOfSequencesIsALimitLikeAnyOther) {
  std::vector<SequenceId> open;
  for (int i = 0; i < 4; ++i) open.push_back(*Open(0));
  ASSERT_TRUE(registry_.ReportPlan(TestFinished(epoch_, open[2], 1)).ok());
  ASSERT_TRUE(Open(0).ok());
  ASSERT_TRUE(Open(0).ok());
  EXPECT_FALSE(IsThere(open[2]));
  const absl::Status status = Open(0).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("limit is 5"));
  EXPECT_EQ(ShortageOf(status)->subject, "max_sequences");
}

}  // namespace
}  // namespace heavywater
