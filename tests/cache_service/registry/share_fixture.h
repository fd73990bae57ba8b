// A group of one rank whose sequences end with states, tokens and pages.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/tier/memory_state.h"

namespace heavywater {

class ShareFixture : public ::testing::Test {
 protected:
  static constexpr int64_t kPrompt = 40;  // two whole pages and a half
  static constexpr int64_t kTokens = 50;  // seen; a state of 45 was reported
  static constexpr int64_t kPageRow = 4 * 4096;

  void SetUp() override {
    registry_.groups().Join(registry_.groups().NewTicket(), TestJoin(0, 1),
                            [this](absl::StatusOr<v1::JoinResponse> joined) {
                              ASSERT_TRUE(joined.ok());
                              epoch_ = joined->epoch();
                            });
    ASSERT_TRUE(registry_.AttachDirect("group", 0, epoch_).ok());
  }

  // Of the tokens first_token, first_token + 1, ...
  v1::OpenSequenceRequest Request(int first_token, const std::string& tenant = "") {
    v1::OpenSequenceRequest request = TestOpen(absl::StrCat("request-", ++num_requests_), epoch_);
    request.set_tenant(tenant);
    request.set_prompt_tokens(kPrompt);
    for (int i = 0; i < kPrompt; ++i) request.mutable_prefix()->add_tokens(first_token + i);
    request.mutable_prefix()->set_max_tokens(kPrompt - 1);
    return request;
  }
  v1::OpenSequenceResponse Open(const v1::OpenSequenceRequest& request) {
    const auto opened = registry_.Open(request);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.value_or(v1::OpenSequenceResponse());
  }
  // Its rank writes all that is not stored, reports, and stops.
  void Finish(SequenceId id, int first_token, int64_t stored = 0) {
    ASSERT_TRUE(store_.Reserve({.sequence = id, .heads = {0, 2}, .num_pages = 4}, false).ok());
    const std::vector<std::byte> row(256, static_cast<std::byte>(first_token));
    for (int of_page = 0; of_page < 4; ++of_page) {
      for (int64_t position = stored; position < kTokens; ++position) {
        ASSERT_TRUE(store_.Write(0, {id, of_page / 2, of_page % 2, position, 1}, row).ok());
      }
    }
    ASSERT_TRUE(store_.Commit(id, 0, kTokens).ok());
    Report(id, first_token, 1, 45);
    Report(id, first_token, 2, kTokens);
  }
  void Report(SequenceId id, int first_token, int64_t plan, int64_t tokens) {
    v1::ReportPlanRequest request = TestFinished(epoch_, id, static_cast<int>(tokens));
    v1::PlanReport& report = *request.mutable_reports(0);
    report.set_plan(plan);
    report.set_finished(tokens == kTokens);
    if (tokens < kTokens) {
      AddTestState(tokens, report);
    } else {
      report.set_watermark(tokens);
      for (int64_t i = 0; i < tokens; ++i) report.add_tokens(0);
    }
    for (int64_t i = 0; i < tokens; ++i) {
      report.set_tokens(static_cast<int>(i), static_cast<int32_t>(first_token + i));
    }
    const auto taken = registry_.ReportPlan(request);
    ASSERT_TRUE(taken.ok()) << taken.status();
  }
  // One that has run to its end.
  SequenceId Make(int first_token, const std::string& tenant = "") {
    const v1::OpenSequenceResponse opened = Open(Request(first_token, tenant));
    Finish(opened.sequence_id(), first_token, opened.prefix_tokens());
    return opened.sequence_id();
  }
  void Close(SequenceId id) {
    v1::CloseSequenceRequest request;
    request.set_sequence_id(id);
    ASSERT_TRUE(registry_.sequences().Close(request).ok());
  }
  int64_t UsedBytes() {
    const PageStoreStats stats = store_.Stats();
    EXPECT_EQ(stats.used_bytes + stats.free_bytes, stats.total_bytes);
    return stats.used_bytes;
  }

  FakeClock clock_;
  MemoryState state_;
  HostPageStore store_{*Slab::Create("", 200 * 4096), &state_};
  RegistryOptions options_;
  Registry registry_{options_, store_, clock_, &state_};
  Epoch epoch_ = 0;
  int num_requests_ = 0;
};

}  // namespace heavywater
