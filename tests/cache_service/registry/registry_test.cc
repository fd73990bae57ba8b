#include "cache_service/registry/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "cache_service/registry/layout.h"
#include "tests/cache_service/registry/registry_fixture.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class RegistryTest : public RegistryFixture {};

TEST_F(RegistryTest, AReplayedOpenReturnsTheFirstAnswer) {
  const SequenceId id = Open("request");
  EXPECT_EQ(id, 1000u);
  EXPECT_EQ(Open("request"), id);
  EXPECT_EQ(registry_.sequences().num_sequences(), 1);
  v1::OpenSequenceRequest other = TestOpen("request", epoch_);
  other.set_max_tokens(999);
  EXPECT_EQ(registry_.Open(other).status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(Close(id).ok());
  EXPECT_EQ(Open("request"), id) << "also after its end";
  EXPECT_GT(Open("another"), id) << "ids are not used twice";
}

TEST_F(RegistryTest, AnOpenMustMatchItsGroup) {
  v1::OpenSequenceRequest request = TestOpen("request", epoch_);
  request.mutable_fingerprint()->set_dtype("fp32");
  absl::Status status = registry_.Open(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("fp32"), HasSubstr("bf16")));
  EXPECT_EQ(registry_.Open(TestOpen("request", epoch_ + 1)).status().code(),
            absl::StatusCode::kAborted);
  request = TestOpen("request", epoch_);
  request.set_group("nobody");
  EXPECT_EQ(registry_.Open(request).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RegistryTest, WhetherKeysLieRotatedIsEachSequencesOwn) {
  v1::OpenSequenceRequest request = TestOpen("request", epoch_);
  request.mutable_fingerprint()->set_positions("cache_relative");
  const auto opened = registry_.Open(request);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const SequenceId id = opened->sequence_id();
  EXPECT_EQ(registry_.sequences().Get(id)->fingerprint().positions(), "cache_relative");
  EXPECT_NE(registry_.sequences().Get(Open("another"))->fingerprint().positions(),
            "cache_relative");
}

TEST_F(RegistryTest, APlanIsCommittedWhenTheLastOfItsPagesHasArrivedWithoutAnotherReport) {
  const SequenceId id = Open("request");
  ASSERT_TRUE(Reserve(id, 1, 2, /*direct=*/false).ok());
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_TRUE(registry_.ReportPlan(Report(rank, id, 1, 5)).ok());
  }
  v1::GetSetsRequest sets;
  sets.set_sequence_id(id);
  EXPECT_EQ(registry_.sequences().Get(id)->committed_plan(), 0) << "rank 0 writes no pages";
  EXPECT_THAT(*registry_.sequences().GetSets(sets), IsEmpty());
  for (int layer = 0; layer < 2; ++layer) {
    for (const auto& [first, count] : {std::pair{0, 16}, std::pair{16, 4}}) {
      const std::vector<std::byte> rows(count * 256, std::byte{7});
      ASSERT_TRUE(store_.Write(1, {id, layer, 1, first, count}, rows).ok());
    }
  }
  ASSERT_TRUE(store_.Commit(id, 1, 19).ok());
  EXPECT_THAT(*registry_.sequences().GetSets(sets), IsEmpty());
  ASSERT_TRUE(store_.Commit(id, 1, 20).ok());
  registry_.sequences().NoteCommit(id);
  // From here on nothing more is committed.
  ASSERT_TRUE(registry_.ReportPlan(Report(0, id, 2, 6)).ok());
  EXPECT_FALSE(registry_.ReportPlan(Report(1, id, 2, 7)).ok());
  EXPECT_EQ(registry_.sequences().GetSets(sets)->size(), 2u);
  EXPECT_EQ(registry_.sequences().Get(id)->committed_tokens(), 20);
}

TEST_F(RegistryTest, BadOpensNameTheFieldAndChangeNothing) {
  const auto expect_invalid = [&](auto change, const char* field) {
    v1::OpenSequenceRequest request = TestOpen("request", epoch_);
    change(request);
    const absl::Status status = registry_.Open(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
  };
  expect_invalid([](auto& r) { r.set_request_id(""); }, "request_id");
  expect_invalid([](auto& r) { r.set_max_tokens(0); }, "max_tokens");
  expect_invalid([](auto& r) { r.set_max_tokens(int64_t{1} << 40); }, "max_tokens");
  expect_invalid([](auto& r) { r.set_prompt_tokens(1001); }, "prompt_tokens");
  expect_invalid([](auto& r) { r.set_prompt_tokens(-1); }, "prompt_tokens");
  expect_invalid([](auto& r) { r.set_lease_ms(-1); }, "lease_ms");
  expect_invalid([](auto& r) { r.mutable_budget()->set_scope("head"); }, "budget.scope");
  expect_invalid([](auto& r) { r.mutable_policy()->set_pooling(std::string(129, 'x')); },
                 "policy.pooling has 129 bytes");
  expect_invalid([](auto& r) { r.mutable_budget()->set_sink_tokens(-1); }, "budget.sink_tokens");
  EXPECT_EQ(registry_.sequences().num_sequences(), 0);
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

TEST_F(RegistryTest, TooManySequencesOrPagesAreRefusedNamingTheLimit) {
  v1::OpenSequenceRequest large = TestOpen("large", epoch_);
  large.set_prompt_tokens(1000);
  absl::Status status = registry_.Open(large).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("need 1036288"), HasSubstr("409600")));
  for (int i = 0; i < 5; ++i) Open(absl::StrCat("request", i));
  status = registry_.Open(TestOpen("one more", epoch_)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("limit is 5"));
}

TEST_F(RegistryTest, HeartbeatsRenewLeasesAndTheEndOfALeaseFreesThePages) {
  const SequenceId kept = Open("kept");
  const SequenceId forgotten = Open("forgotten");
  ASSERT_TRUE(Reserve(forgotten, 0, 2, /*direct=*/false).ok());
  PassWithHeartbeats(absl::Seconds(70), {kept});
  EXPECT_TRUE(registry_.sequences().Get(kept).ok());
  EXPECT_EQ(registry_.sequences().Get(forgotten).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_.Stats().pages, 0);
  const auto beat = Heartbeat(0, {kept, forgotten, 5});
  ASSERT_TRUE(beat.ok());
  EXPECT_THAT(beat->unknown_sequence_ids(), ElementsAre(forgotten, 5));
}

TEST_F(RegistryTest, ASequenceOutlivesItsWorkersUntilItsLeaseEnds) {
  const SequenceId id = Open("request");
  ASSERT_TRUE(registry_.ReportPlan(Report(0, id, 1, 9)).ok());
  ASSERT_TRUE(registry_.ReportPlan(Report(1, id, 1, 9)).ok());
  Pass(absl::Seconds(30));  // the ranks' leases are over
  EXPECT_EQ(registry_.groups().num_ranks(), 0);
  v1::GetSetsRequest request;
  request.set_sequence_id(id);
  const auto sets = registry_.sequences().GetSets(request);
  ASSERT_TRUE(sets.ok()) << sets.status();
  EXPECT_EQ(sets->size(), 2u);
  // Not NOT_FOUND, which would say that the sequence is gone.
  EXPECT_EQ(registry_.CheckWriter(id, 0, epoch_).status().code(), absl::StatusCode::kAborted);
  Pass(absl::Seconds(31));
  EXPECT_EQ(registry_.sequences().GetSets(request).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

TEST_F(RegistryTest, SetsShowWhatIsHeavyRecentAndDemoted) {
  const SequenceId id = Open("request");
  v1::GetSetsRequest request;
  request.set_sequence_id(id);
  EXPECT_THAT(*registry_.sequences().GetSets(request), IsEmpty());
  ASSERT_TRUE(registry_.ReportPlan(Report(0, id, 1, 9)).ok());
  ASSERT_TRUE(registry_.ReportPlan(Report(1, id, 1, 9)).ok());
  request.add_layers(1);
  const auto sets = registry_.sequences().GetSets(request);
  ASSERT_TRUE(sets.ok());
  ASSERT_EQ(sets->size(), 1u);
  EXPECT_THAT((*sets)[0].sinks(), ElementsAre(0));
  EXPECT_THAT((*sets)[0].heavy(), ElementsAre(7));
  EXPECT_THAT((*sets)[0].recent(), ElementsAre(16, 17, 18, 19));
  EXPECT_THAT((*sets)[0].demoted_ranges(), ElementsAre(1, 7, 8, 16));
  request.add_layers(2);
  EXPECT_EQ(registry_.sequences().GetSets(request).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto sequence = registry_.sequences().Get(id);
  ASSERT_TRUE(sequence.ok());
  EXPECT_EQ(sequence->committed_plan(), 1);
  EXPECT_EQ(sequence->counts().tokens_resident(), 6);
  EXPECT_EQ(sequence->counts().tokens_demoted(), 14);
}

TEST_F(RegistryTest, LongTextComesInPagesBelowTheLimitOfAMessage) {
  constexpr int kTokens = 1'000'000;
  v1::OpenSequenceRequest open = TestOpen("long", epoch_);
  open.set_max_tokens(kTokens);
  const SequenceId id = registry_.Open(open)->sequence_id();
  v1::ReportPlanRequest request = Report(0, id, 1, 9);
  for (int i = 0; i < kTokens; ++i) request.mutable_reports(0)->add_tokens(0x7fff0000 + i % 1000);
  ASSERT_TRUE(registry_.ReportPlan(request).ok());
  const auto first = registry_.sequences().Get(id);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->num_tokens(), kTokens);
  EXPECT_EQ(registry_.sequences().List({})->sequences(0).num_tokens(), kTokens);
  EXPECT_EQ(first->tokens_size(), 700'000);
  EXPECT_LT(first->ByteSizeLong(), size_t{4} << 20);
  const auto second = registry_.sequences().Get(id, first->tokens_size());
  EXPECT_EQ(second->tokens_size(), 300'000);
  EXPECT_EQ(second->tokens(1), request.reports(0).tokens(700'001));
  EXPECT_TRUE(registry_.sequences().Get(id, kTokens)->tokens().empty());
  EXPECT_EQ(registry_.sequences().Get(id, -1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(RegistryTest, DisagreementReachesEveryRankThroughReportsAndHeartbeats) {
  const SequenceId id = Open("request");
  ASSERT_TRUE(registry_.ReportPlan(Report(0, id, 1, 9)).ok());
  const absl::Status late = registry_.ReportPlan(Report(1, id, 1, 8)).status();
  for (const absl::Status& status :
       {late, Heartbeat(0, {id}).status(), registry_.ReportPlan(Report(0, id, 2, 9)).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("9 on rank 0"), HasSubstr("8 on rank 1")));
  }
  EXPECT_TRUE(Heartbeat(1, {}).ok()) << "other sequences go on";
  EXPECT_EQ(registry_.sequences().num_disagreements(), 1);
}

TEST_F(RegistryTest, AReportOfAnEndedSequenceDoesNotHoldUpTheOthers) {
  const SequenceId gone = Open("gone");
  const SequenceId id = Open("request");
  ASSERT_TRUE(Close(gone).ok());
  v1::ReportPlanRequest request = Report(0, gone, 1, 9);
  *request.add_reports() = Report(0, id, 1, 9).reports(0);
  const auto response = registry_.ReportPlan(request);
  ASSERT_TRUE(response.ok());
  EXPECT_THAT(response->unknown_sequence_ids(), ElementsAre(gone));
  ASSERT_TRUE(registry_.ReportPlan(Report(1, id, 1, 9)).ok());
  EXPECT_EQ(registry_.sequences().Get(id)->committed_plan(), 1);
}

TEST_F(RegistryTest, ABadReportChangesNothing) {
  const SequenceId id = Open("request");
  v1::ReportPlanRequest request = Report(0, id, 1, 9);
  *request.add_reports() = Report(0, id, 0, 9).reports(0);
  EXPECT_EQ(registry_.ReportPlan(request).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(registry_.sequences().num_reports(), 0);
  request = Report(0, id, 1, 9);
  request.set_epoch(epoch_ + 1);
  EXPECT_EQ(registry_.ReportPlan(request).status().code(), absl::StatusCode::kAborted);
}

TEST_F(RegistryTest, AReplayedCloseIsFineAndASecondOneIsNotFound) {
  const SequenceId id = Open("request");
  EXPECT_TRUE(Close(id, "close-1").ok());
  EXPECT_TRUE(Close(id, "close-1").ok());
  EXPECT_EQ(Close(id, "close-2").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Close(12345).code(), absl::StatusCode::kNotFound);
}

TEST_F(RegistryTest, ListsInPagesByGroup) {
  for (int i = 0; i < 5; ++i) Open(absl::StrCat("request", i));
  v1::ListSequencesRequest request;
  request.set_page_size(2);
  std::vector<SequenceId> ids;
  do {
    const auto page = registry_.sequences().List(request);
    ASSERT_TRUE(page.ok());
    ASSERT_LE(page->sequences_size(), 2);
    for (const v1::Sequence& sequence : page->sequences()) ids.push_back(sequence.sequence_id());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(ids, ElementsAre(1000, 1001, 1002, 1003, 1004));
  request.set_group("nobody");
  EXPECT_EQ(registry_.sequences().List(request)->sequences_size(), 0);
  request.set_page_token("x");
  EXPECT_EQ(registry_.sequences().List(request).status().code(),
            absl::StatusCode::kInvalidArgument);
  request.set_page_token("");
  request.set_page_size(1001);
  EXPECT_EQ(registry_.sequences().List(request).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(RegistryTest, TenThousandCyclesLeakNothing) {
  for (int i = 0; i < 10'000; ++i) {
    const SequenceId id = Open(absl::StrCat("request", i));
    ASSERT_NE(id, 0u);
    ASSERT_TRUE(Reserve(id, i % 2, 2, /*direct=*/false).ok());
    ASSERT_TRUE(Close(id).ok());
    if (i % 100 == 0) registry_.Tick();
  }
  const PageStoreStats stats = store_.Stats();
  EXPECT_EQ(stats.used_bytes, 0);
  EXPECT_EQ(stats.free_bytes, stats.total_bytes);
  EXPECT_EQ(stats.promised_bytes, 0);
  EXPECT_EQ(registry_.sequences().num_sequences(), 0);
}

TEST(LayoutTest, HalfPrecisionRowsOfEitherKindTakeHalfTheBytes) {
  v1::Fingerprint fingerprint = TestFingerprint();
  const std::vector<std::pair<std::string, int>> sizes = {
      {"fp32", 512}, {"bf16", 256}, {"fp16", 256}};
  for (const auto& [dtype, bytes] : sizes) {
    fingerprint.set_dtype(dtype);
    const auto geometry = GeometryOf(fingerprint);
    ASSERT_TRUE(geometry.ok()) << geometry.status();
    EXPECT_EQ(geometry->row_bytes, bytes) << dtype;
  }
}

}  // namespace
}  // namespace heavywater
