// A rank's host tier and a real cache service, whose leases are measured with a
// clock that stands still.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/worker/server/test_cache_service.h"
#include "worker/server/remote_host_tier.h"

namespace heavywater {

// That of TestFingerprint().
inline constexpr PageGeometry kTierGeometry{
    .num_layers = 2, .num_kv_heads = 2, .page_tokens = 16, .row_bytes = 256};
inline constexpr HeadRange kTierHeads{.first = 0, .count = 2};
inline constexpr int64_t kTierPageRow = 4 * 4096;  // one page number: all layers and heads
inline constexpr absl::Duration kTierLease = absl::Seconds(20);

class RemoteHostTierTest : public ::testing::Test {
 protected:
  RemoteHostTierTest() {
    service_.Stop();
    service_.config().set_host_bytes(64 * kTierPageRow);
    service_.config().set_rank_lease_ms(1000);  // a heartbeat each 200 ms
    service_.Start();
  }

  // The rank joins. Without heartbeats it is cut off as soon as it has opened.
  void Join(bool heartbeats, RemoteHostTierOptions options = {}) {
    tier_.reset();  // it takes leave of its link
    link_ = std::make_unique<CacheLink>(CacheLinkOptions{.services = {{service_.address()}},
                                                         .group = "group",
                                                         .instance = "instance",
                                                         .fingerprint = TestFingerprint(),
                                                         .clock = &clock_});
    StopFlag stop;
    ASSERT_TRUE(link_->Join(stop).ok());
    if (heartbeats) link_->StartHeartbeats();
    tier_ = std::make_unique<RemoteHostTier>(*link_, options);
  }

  // As rank 0 opens a sequence and tells the ranks.
  SequenceId Open(int64_t max_tokens = 256, int64_t prompt_tokens = 0) {
    v1::OpenSequenceRequest request =
        TestOpen("request-" + std::to_string(++opened_), link_->epoch());
    request.set_max_tokens(max_tokens);
    request.set_prompt_tokens(prompt_tokens);
    request.set_lease_ms(absl::ToInt64Milliseconds(kTierLease));
    grpc::ClientContext context;
    v1::OpenSequenceResponse response;
    const grpc::Status status =
        v1::SequenceService::NewStub(service_.Channel())->Open(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    tier_->Expect(response.sequence_id(), max_tokens, absl::Milliseconds(response.lease_ms()));
    EXPECT_TRUE(tier_->OpenSequence(response.sequence_id(), kTierGeometry, kTierHeads).ok());
    return response.sequence_id();
  }

  // Every row of the positions holds `value`; false when one has no place.
  bool Write(SequenceId sequence, int64_t first, int64_t count, int value) {
    for (int layer = 0; layer < kTierGeometry.num_layers; ++layer) {
      for (int head = 0; head < kTierHeads.count; ++head) {
        for (int64_t position = first; position < first + count; ++position) {
          std::byte* page = tier_->Page(sequence, layer, head, kTierGeometry.PageOf(position));
          if (page == nullptr) return false;
          std::memset(page + kTierGeometry.RowOf(position) * kTierGeometry.row_bytes, value,
                      static_cast<size_t>(kTierGeometry.row_bytes));
        }
      }
    }
    return true;
  }

  // Whether the service gives the position's row of layer 1, head 1, as written.
  bool ReadsBack(SequenceId sequence, int64_t position, int value) {
    const auto row = service_.ReadRow(sequence, 1, 1, position);
    return row.ok() && *row == std::string(static_cast<size_t>(kTierGeometry.row_bytes),
                                           static_cast<char>(value));
  }

  template <typename Condition>
  static bool Eventually(Condition condition) {
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    while (!condition() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
    return condition();
  }

  FakeClock clock_;
  TestCacheService service_{clock_};
  std::unique_ptr<CacheLink> link_;
  std::unique_ptr<RemoteHostTier> tier_;
  int opened_ = 0;
};

}  // namespace heavywater
