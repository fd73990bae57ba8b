// The registry goes on from its records.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/stale_slabs.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/tier/memory_state.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kRanks = 2;

class RegistryRestartTest : public ::testing::Test {
 protected:
  RegistryRestartTest() {
    static int count = 0;
    slab_name_ = absl::StrCat("heavywater-registry-test-", getpid(), "-", ++count);
    auto slab = Slab::Create(slab_name_, 200 * 4096);
    EXPECT_TRUE(slab.ok()) << slab.status();
    (*slab)->Keep();
    nonce_ = (*slab)->nonce();
    bytes_ = (*slab)->object_bytes();
    store_ = std::make_unique<HostPageStore>(*std::move(slab), &state_);
    registry_ = std::make_unique<Registry>(RegistryOptions(), *store_, clock_, &state_);
    epoch_ = Form();
  }
  ~RegistryRestartTest() override {
    registry_.reset();
    store_.reset();
    RemoveStaleSlab(slab_name_);
  }

  absl::Status Restart() {
    registry_.reset();
    store_.reset();
    auto slab = Slab::Adopt(slab_name_, bytes_, nonce_);
    if (!slab.ok()) return slab.status();
    (*slab)->Keep();
    store_ = std::make_unique<HostPageStore>(*std::move(slab), &state_);
    registry_ = std::make_unique<Registry>(RegistryOptions(), *store_, clock_, &state_);
    const auto restored = store_->Restore();
    if (!restored.ok()) return restored.status();
    return registry_->Restore(restored->live, restored->retiring);
  }
  Epoch Form() {
    Epoch epoch = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      registry_->groups().Join(registry_->groups().NewTicket(), TestJoin(rank, kRanks),
                               [&epoch](absl::StatusOr<v1::JoinResponse> joined) {
                                 if (joined.ok()) epoch = joined->epoch();
                               });
    }
    return epoch;
  }
  // A sequence whose ranks may still write to a page of it.
  void CloseWhileWritten() {
    const SequenceId id = Open("request");
    ASSERT_TRUE(store_->Reserve({.sequence = id, .heads = {0, 2}, .num_pages = 1}, true).ok());
    v1::CloseSequenceRequest close;
    close.set_sequence_id(id);
    ASSERT_TRUE(registry_->sequences().Close(close).ok());
  }
  SequenceId Open(const std::string& request_id) {
    const auto opened = registry_->Open(TestOpen(request_id, epoch_));
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? opened->sequence_id() : 0;
  }
  absl::Status Heartbeat(int rank, std::vector<SequenceId> ids = {}) {
    v1::HeartbeatRequest request;
    request.set_group("group");
    request.set_rank(rank);
    request.set_epoch(epoch_);
    request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
    return registry_->Heartbeat(request).status();
  }
  // One plan, of both ranks, with its sets, tokens and a snapshot.
  void Report(SequenceId id, int64_t plan, int64_t tokens, const std::string& snapshot) {
    for (int rank = 0; rank < kRanks; ++rank) {
      v1::ReportPlanRequest request;
      request.set_group("group");
      request.set_rank(rank);
      request.set_epoch(epoch_);
      v1::PlanReport& report = *request.add_reports();
      report.set_sequence_id(id);
      report.set_plan(plan);
      report.set_tokens_seen(tokens);
      report.set_watermark(tokens);
      report.set_hash(plan);
      report.mutable_snapshot()->set_data(absl::StrCat(snapshot, rank));
      report.mutable_snapshot()->set_total_bytes(static_cast<int64_t>(snapshot.size()) + 1);
      if (rank == 0) AddSetsAndTokens(plan, tokens, report);
      const auto sent = registry_->ReportPlan(request);
      ASSERT_TRUE(sent.ok()) << sent.status();
    }
  }
  static void AddSetsAndTokens(int64_t plan, int64_t tokens, v1::PlanReport& report) {
    for (int layer = 0; layer < 2; ++layer) {
      v1::ReportedSet& set = *report.add_sets();
      set.set_layer(layer);
      set.set_kv_head(-1);
      for (const int32_t position :
           {0, static_cast<int32_t>(plan), static_cast<int32_t>(tokens) - 1}) {
        set.add_positions(position);
        set.add_scores(position + plan);
      }
    }
    for (int32_t token = 0; token < tokens; ++token) report.add_tokens(7 * token);
  }
  // All that people and ranks can ask about a sequence, but for leases.
  std::vector<std::string> Answers(SequenceId id) {
    std::vector<std::string> answers;
    const auto add = [&](const auto& result) {
      answers.push_back(result.ok() ? result->ShortDebugString() : result.status().ToString());
    };
    auto sequence = registry_->sequences().Get(id);
    if (sequence.ok()) sequence->clear_lease_remaining_ms();
    add(sequence);
    v1::GetSetsRequest sets;
    sets.set_sequence_id(id);
    const auto got = registry_->sequences().GetSets(sets);
    EXPECT_TRUE(got.ok()) << got.status();
    if (!got.ok()) return answers;
    for (const v1::SequenceSet& set : *got) {
      answers.push_back(set.ShortDebugString());
    }
    for (int64_t plan = 1; plan < 8; ++plan) {
      v1::ReadSnapshotRequest read;
      read.set_sequence_id(id);
      read.set_plan(plan);
      read.set_rank(1);
      add(registry_->sequences().ReadSnapshot(read));
    }
    return answers;
  }

  FakeClock clock_;
  MemoryState state_;
  std::string slab_name_;
  uint64_t nonce_ = 0;
  int64_t bytes_ = 0;
  std::unique_ptr<HostPageStore> store_;
  std::unique_ptr<Registry> registry_;
  Epoch epoch_ = 0;
};

TEST_F(RegistryRestartTest, SetsTokensAndSnapshotsAreThoseOfBefore) {
  const SequenceId id = Open("request");
  for (int64_t plan = 1; plan <= 5; ++plan)
    Report(id, plan, 20 + plan, absl::StrCat("state ", plan));
  const std::vector<std::string> before = Answers(id);
  EXPECT_THAT(before[0], HasSubstr("committed_plan: 5"));
  EXPECT_THAT(before.back(), HasSubstr("NOT_FOUND"));
  ASSERT_TRUE(Restart().ok());
  EXPECT_EQ(Answers(id), before);
  // And again, from the records that the restored one has written on.
  Report(id, 6, 26, "state 6");
  const std::vector<std::string> later = Answers(id);
  EXPECT_NE(later, before);
  ASSERT_TRUE(Restart().ok());
  EXPECT_EQ(Answers(id), later);
}

// Many reports, so that the whole record takes their place more than once.
TEST_F(RegistryRestartTest, LongHistoriesAreReplacedByTheWhole) {
  const SequenceId id = Open("request");
  for (int64_t plan = 1; plan <= 40; ++plan) {
    Report(id, plan, 20 + plan, std::string(400'000, static_cast<char>('a' + plan % 20)));
  }
  int64_t bytes = 0;
  for (const auto& [key, value] : state_.Records()) bytes += static_cast<int64_t>(value.size());
  EXPECT_LT(bytes, 12 << 20) << "of " << 40 * kRanks * 400'000 << " that were reported";
  const std::vector<std::string> before = Answers(id);
  ASSERT_TRUE(Restart().ok());
  EXPECT_EQ(Answers(id), before);
}

TEST_F(RegistryRestartTest, TheGroupGoesOnInItsFormation) {
  v1::PutRequest put;
  put.set_group("group");
  put.set_epoch(epoch_);
  put.set_key("where");
  put.set_value("there");
  ASSERT_TRUE(registry_->groups().Put(put).ok());
  const SequenceId id = Open("request");
  ASSERT_TRUE(registry_->AttachDirect("group", 1, epoch_).ok());
  clock_.Advance(absl::Seconds(4));
  ASSERT_TRUE(Restart().ok());
  clock_.Advance(absl::Seconds(4));
  registry_->Tick();  // the ranks' leases of before would be over
  EXPECT_TRUE(Heartbeat(0, {id}).ok());
  EXPECT_TRUE(Heartbeat(1).ok());
  EXPECT_TRUE(registry_->groups().IsDirect("group", 1));
  EXPECT_FALSE(registry_->groups().IsDirect("group", 0));
  std::string value;
  v1::WaitRequest wait;
  wait.set_group("group");
  wait.set_epoch(epoch_);
  wait.set_key("where");
  registry_->groups().Wait(registry_->groups().NewTicket(), wait,
                           [&](absl::StatusOr<std::string> got) { value = got.value_or("none"); });
  EXPECT_EQ(value, "there");
  EXPECT_GT(Open("another"), id);
}

TEST_F(RegistryRestartTest, ADissolvedFormationStaysDissolved) {
  v1::LeaveRequest leave;
  leave.set_group("group");
  leave.set_rank(1);
  leave.set_epoch(epoch_);
  ASSERT_TRUE(registry_->groups().Leave(leave).ok());
  ASSERT_TRUE(Restart().ok());
  EXPECT_EQ(Heartbeat(0).code(), absl::StatusCode::kAborted);
  EXPECT_GT(Form(), epoch_);
}

TEST_F(RegistryRestartTest, ReplaysGetTheAnswersOfBefore) {
  const SequenceId open = Open("request");
  const SequenceId gone = Open("closed");
  v1::CloseSequenceRequest close;
  close.set_sequence_id(gone);
  close.set_request_id("close");
  ASSERT_TRUE(registry_->sequences().Close(close).ok());
  ASSERT_TRUE(Restart().ok());
  EXPECT_EQ(Open("request"), open);
  EXPECT_TRUE(registry_->sequences().Close(close).ok());
  close.set_request_id("another");
  EXPECT_EQ(registry_->sequences().Close(close).code(), absl::StatusCode::kNotFound);
}

TEST_F(RegistryRestartTest, AnEndedSequencesWriterIsWaitedForAcrossTheRestart) {
  ASSERT_TRUE(registry_->AttachDirect("group", 0, epoch_).ok());
  CloseWhileWritten();
  ASSERT_TRUE(Restart().ok());
  EXPECT_GT(store_->Stats().retiring_bytes, 0);
  // The first heartbeat after the end may have been under way.
  ASSERT_TRUE(Heartbeat(0).ok());
  EXPECT_GT(store_->Stats().used_bytes, 0);
  ASSERT_TRUE(Heartbeat(0).ok());
  EXPECT_EQ(store_->Stats().used_bytes, 0);
}

TEST_F(RegistryRestartTest, ASilentWriterOfBeforeIsWaitedForALeaseAndNoLonger) {
  ASSERT_TRUE(registry_->AttachDirect("group", 0, epoch_).ok());
  CloseWhileWritten();
  ASSERT_TRUE(Restart().ok());
  clock_.Advance(absl::Seconds(60));
  registry_->Tick();
  EXPECT_GT(store_->Stats().used_bytes, 0);
  clock_.Advance(absl::Seconds(6));
  registry_->Tick();
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_THAT(state_.Records(), IsEmpty()) << "the group is gone, too";
}

TEST_F(RegistryRestartTest, ASuspendedSequenceStaysSuspended) {
  const SequenceId id = Open("request");
  Report(id, 1, 20, "state");
  v1::SuspendSequenceRequest suspend;
  suspend.set_sequence_id(id);
  suspend.set_ttl_ms(600'000);
  ASSERT_TRUE(registry_->sequences().Suspend(suspend).ok());
  ASSERT_TRUE(Restart().ok());
  clock_.Advance(absl::Seconds(599));
  registry_->Tick();
  const auto kept = registry_->sequences().Get(id);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_TRUE(kept->suspended());
}

// Killed between the record of a sequence's end (or beginning) and that of its pages.
TEST_F(RegistryRestartTest, WhatIsHalfEndedOrHalfBegunIsGone) {
  const SequenceId without_pages = Open("request");
  const SequenceId without_record = Open("another");
  StateBatch torn;
  torn.Delete(StateKey(StateKind::kPages, without_pages));
  torn.Delete(StateKey(StateKind::kSequence, without_record));
  state_.Apply(torn);
  ASSERT_TRUE(Restart().ok());
  EXPECT_EQ(registry_->sequences().num_sequences(), 0);
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_EQ(store_->Stats().sequences, 0);
}

TEST_F(RegistryRestartTest, ADamagedRecordIsNamed) {
  const SequenceId id = Open("request");
  state_.Set(StateKey(StateKind::kSequence, id), "no message");
  const absl::Status restarted = Restart();
  EXPECT_EQ(restarted.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(restarted.message()), HasSubstr(absl::StrCat(id)));
}

}  // namespace
}  // namespace heavywater
