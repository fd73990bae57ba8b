// The reporter against a service that comes and goes.
#include "worker/server/reporter.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

// Remembers what it is told, and answers as it is told.
class FakeGroupService final : public v1::GroupService::Service {
 public:
  grpc::Status ReportPlan(grpc::ServerContext*, const v1::ReportPlanRequest* request,
                          v1::ReportPlanResponse*) override {
    MutexLock lock(&mutex_);
    ++calls_;
    for (const v1::PlanReport& report : request->reports()) {
      if (report.sequence_id() == refused_) {
        return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "refused by the test");
      }
    }
    if (answer_ != grpc::StatusCode::OK) return grpc::Status(answer_, "the test says so");
    for (const v1::PlanReport& report : request->reports()) reports_.push_back(report);
    return grpc::Status::OK;
  }
  void Answer(grpc::StatusCode code) {
    MutexLock lock(&mutex_);
    answer_ = code;
  }
  void Refuse(SequenceId sequence) {
    MutexLock lock(&mutex_);
    refused_ = sequence;
  }
  std::vector<v1::PlanReport> reports() {
    MutexLock lock(&mutex_);
    return reports_;
  }
  int calls() {
    MutexLock lock(&mutex_);
    return calls_;
  }

 private:
  Mutex mutex_;
  std::vector<v1::PlanReport> reports_ ABSL_GUARDED_BY(mutex_);
  grpc::StatusCode answer_ ABSL_GUARDED_BY(mutex_) = grpc::StatusCode::OK;
  SequenceId refused_ ABSL_GUARDED_BY(mutex_) = 0;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
};

class ReporterTest : public ::testing::Test {
 protected:
  ReporterTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    link_ = std::make_unique<CacheLink>(
        CacheLinkOptions{.services = {{"127.0.0.1:" + std::to_string(port)}}});
  }

  FakeGroupService service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<CacheLink> link_;
};

QueuedReport Report(SequenceId sequence, int64_t plan, bool keep) {
  QueuedReport queued;
  queued.report.set_sequence_id(sequence);
  queued.report.set_plan(plan);
  queued.report.set_first_token(plan - 1);
  queued.report.add_tokens(static_cast<int32_t>(plan));
  queued.keep = keep;
  return queued;
}

std::vector<int32_t> TokensOf(const std::vector<v1::PlanReport>& reports) {
  std::vector<int32_t> tokens;
  for (const v1::PlanReport& report : reports) {
    if (report.tokens().empty()) continue;
    EXPECT_EQ(report.first_token(), static_cast<int64_t>(tokens.size()));
    tokens.insert(tokens.end(), report.tokens().begin(), report.tokens().end());
  }
  return tokens;
}

TEST_F(ReporterTest, NothingIsLostThroughAnOutage) {
  for (const grpc::StatusCode away :
       {grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::ABORTED, grpc::StatusCode::NOT_FOUND}) {
    FakeGroupService& service = service_;
    const size_t before = service.reports().size();
    Reporter reporter(*link_, {});
    service.Answer(away);
    std::vector<int32_t> want;
    for (int64_t plan = 1; plan <= 40; ++plan) {
      reporter.Push(Report(7, plan, plan % 8 == 0));
      want.push_back(static_cast<int32_t>(plan));
    }
    EXPECT_FALSE(reporter.Flush(absl::Milliseconds(300)));
    EXPECT_GT(reporter.queued(), 0);
    service.Answer(grpc::StatusCode::OK);
    EXPECT_TRUE(reporter.Flush(absl::Seconds(10)));
    auto reports = service.reports();
    reports.erase(reports.begin(), reports.begin() + static_cast<std::ptrdiff_t>(before));
    EXPECT_EQ(TokensOf(reports), want);
    EXPECT_EQ(reporter.dropped(), 0);
  }
}

TEST_F(ReporterTest, ARefusedReportTakesNoOtherAlong) {
  Reporter reporter(*link_, {});
  service_.Answer(grpc::StatusCode::UNAVAILABLE);
  for (SequenceId sequence : {1, 2, 3}) reporter.Push(Report(sequence, 1, true));
  service_.Refuse(2);
  service_.Answer(grpc::StatusCode::OK);
  EXPECT_TRUE(reporter.Flush(absl::Seconds(10)));
  std::vector<SequenceId> arrived;
  for (const auto& report : service_.reports()) arrived.push_back(report.sequence_id());
  EXPECT_THAT(arrived, ::testing::ElementsAre(1, 3));
  EXPECT_EQ(reporter.dropped(), 1);
}

TEST_F(ReporterTest, ADisagreementOfRanksIsNotSentAgain) {
  Reporter reporter(*link_, {});
  service_.Answer(grpc::StatusCode::FAILED_PRECONDITION);
  reporter.Push(Report(1, 1, true));
  EXPECT_TRUE(reporter.Flush(absl::Seconds(10)));
  EXPECT_EQ(service_.calls(), 1);
  EXPECT_EQ(reporter.dropped(), 0);
}

// A message of gRPC holds 4 MiB.
TEST_F(ReporterTest, AReportThatExceedsAMessageArrivesInParts) {
  QueuedReport large = Report(1, 1, true);
  large.report.set_tokens_seen(500'000);
  large.report.clear_tokens();
  for (int32_t i = 0; i < 500'000; ++i) large.report.add_tokens(1'000'000 + i);
  v1::ReportedSet& set = *large.report.add_sets();
  for (int32_t i = 0; i < 400'000; ++i) {
    set.add_positions(i);
    set.add_scores(int64_t{1} << 50);
  }
  ASSERT_GT(large.report.ByteSizeLong(), size_t{4} << 20);
  Reporter reporter(*link_, {});
  reporter.Push(large);
  EXPECT_TRUE(reporter.Flush(absl::Seconds(20)));
  EXPECT_EQ(reporter.dropped(), 0);
  EXPECT_EQ(TokensOf(service_.reports()).size(), 500'000u);
  int64_t positions = 0;
  for (const v1::PlanReport& part : service_.reports()) {
    for (const v1::ReportedSet& piece : part.sets()) positions += piece.positions_size();
  }
  EXPECT_EQ(positions, 400'000);
}

TEST_F(ReporterTest, EndsWhileTheServiceIsAway) {
  service_.Answer(grpc::StatusCode::UNAVAILABLE);
  Reporter reporter(*link_, {});
  reporter.Push(Report(1, 1, true));
  EXPECT_FALSE(reporter.Flush(absl::Milliseconds(50)));
}

}  // namespace
}  // namespace heavywater
