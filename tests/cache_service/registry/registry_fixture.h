// A registry over a slab of its own, and a group of two ranks.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {

class RegistryFixture : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;

  void SetUp() override { epoch_ = Form(); }

  // Both ranks join.
  Epoch Form() {
    Epoch epoch = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      registry_.groups().Join(registry_.groups().NewTicket(), TestJoin(rank, kRanks),
                              [&epoch](absl::StatusOr<v1::JoinResponse> joined) {
                                ASSERT_TRUE(joined.ok()) << joined.status();
                                epoch = joined->epoch();
                              });
    }
    return epoch;
  }
  SequenceId Open(const std::string& request_id) {
    const auto opened = registry_.Open(TestOpen(request_id, epoch_));
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? opened->sequence_id() : 0;
  }
  absl::Status Close(SequenceId id, const std::string& request_id = "") {
    v1::CloseSequenceRequest request;
    request.set_sequence_id(id);
    request.set_request_id(request_id);
    return registry_.sequences().Close(request);
  }
  absl::StatusOr<v1::HeartbeatResponse> Heartbeat(int rank, std::vector<SequenceId> ids) {
    v1::HeartbeatRequest request;
    request.set_group("group");
    request.set_rank(rank);
    request.set_epoch(epoch_);
    request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
    return registry_.Heartbeat(request);
  }
  v1::ReportPlanRequest Report(int rank, SequenceId id, int64_t plan, uint64_t hash) {
    v1::ReportPlanRequest request;
    request.set_group("group");
    request.set_rank(rank);
    request.set_epoch(epoch_);
    v1::PlanReport& report = *request.add_reports();
    report.set_sequence_id(id);
    report.set_plan(plan);
    report.set_tokens_seen(20);
    report.set_hash(hash);
    report.set_watermark(20);
    for (int layer = 0; layer < 2 && rank == 0; ++layer) {
      v1::ReportedSet& set = *report.add_sets();
      set.set_layer(layer);
      set.set_kv_head(-1);
      for (const int position : {0, 7, 16, 17, 18, 19}) set.add_positions(position);
    }
    return request;
  }
  absl::StatusOr<Reservation> Reserve(SequenceId id, int rank, int64_t num_pages, bool direct) {
    return store_.Reserve(
        {.sequence = id, .rank = rank, .heads = {rank, 1}, .first_page = 0, .num_pages = num_pages},
        direct);
  }
  void Pass(absl::Duration duration) {
    clock_.Advance(duration);
    registry_.Tick();
  }
  // Ranks stay members.
  void PassWithHeartbeats(absl::Duration duration, std::vector<SequenceId> ids) {
    for (absl::Duration passed; passed < duration; passed += absl::Seconds(2)) {
      Pass(absl::Seconds(2));
      for (int rank = 0; rank < kRanks; ++rank) ASSERT_TRUE(Heartbeat(rank, ids).ok());
    }
  }

  FakeClock clock_;
  HostPageStore store_{*Slab::Create("", 100 * 4096)};
  Registry registry_{RegistryOptions{.max_sequences = 5, .first_sequence_id = 1000}, store_,
                     clock_};
  Epoch epoch_ = 0;
};

}  // namespace heavywater
