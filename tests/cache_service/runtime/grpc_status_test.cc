#include "cache_service/runtime/grpc_status.h"

#include <gtest/gtest.h>

#include "cache_service/base/elsewhere.h"
#include "cache_service/base/shortage.h"
#include "heavywater/v1/error_details.pb.h"

namespace heavywater {
namespace {

TEST(GrpcStatusTest, EveryCodeAndItsMessageSurviveTheWayThereAndBack) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "got 1, want 2");
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status) << code;
  }
  EXPECT_EQ(ToGrpcStatus(absl::DataLossError("x")).error_code(), grpc::StatusCode::DATA_LOSS);
}

TEST(GrpcStatusTest, LongMessagesAreCutToFitTrailers) {
  const absl::Status status = absl::InternalError(std::string(100000, 'x'));
  EXPECT_LE(ToGrpcStatus(status).error_message().size(), 4096u);
}

TEST(GrpcStatusTest, WhereASequenceIsGoesAsErrorInfo) {
  const absl::Status status = ElsewhereError("it is at host:1", "host:1");
  EXPECT_EQ(ElsewhereOf(status), "host:1");
  EXPECT_EQ(ElsewhereOf(absl::FailedPreconditionError("x")), std::nullopt);
  const grpc::Status sent = ToGrpcStatus(status);
  EXPECT_EQ(sent.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  v1::RpcStatus details;
  ASSERT_TRUE(details.ParseFromString(sent.error_details()));
  EXPECT_EQ(details.code(), 9);
  ASSERT_EQ(details.details_size(), 1);
  EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  v1::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(details.details(0).value()));
  EXPECT_EQ(info.reason(), "SEQUENCE_ELSEWHERE");
  EXPECT_EQ(info.metadata().at("address"), "host:1");
}

// As a client's library for google.rpc reads it: google.rpc.Status with Any.
TEST(GrpcStatusTest, AShortageGoesAsQuotaFailureAndRetryInfo) {
  const absl::Status status = ExhaustedError("full", {.subject = "host_bytes",
                                                      .need = 5,
                                                      .available = 3,
                                                      .limit = 9,
                                                      .retry_after = absl::Milliseconds(1500)});
  const grpc::Status sent = ToGrpcStatus(status);
  v1::RpcStatus details;
  ASSERT_TRUE(details.ParseFromString(sent.error_details()));
  EXPECT_EQ(details.code(), 8);
  ASSERT_EQ(details.details_size(), 2);
  EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.QuotaFailure");
  v1::QuotaFailure failure;
  ASSERT_TRUE(failure.ParseFromString(details.details(0).value()));
  EXPECT_EQ(failure.violations(0).subject(), "host_bytes");
  EXPECT_EQ(failure.violations(0).description(), "need 5, available 3, limit 9");
  EXPECT_EQ(details.details(1).type_url(), "type.googleapis.com/google.rpc.RetryInfo");
  v1::RetryInfo retry;
  ASSERT_TRUE(retry.ParseFromString(details.details(1).value()));
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 500'000'000);
  EXPECT_EQ(FromGrpcStatus(sent), status) << "a server passes it on";
}

TEST(GrpcStatusTest, WhereWaitingDoesNotHelpThereIsNoRetryInfo) {
  const absl::Status status =
      ExhaustedError("too long", {.subject = "device_memory_bytes", .need = 5, .limit = 3});
  v1::RpcStatus details;
  ASSERT_TRUE(details.ParseFromString(ToGrpcStatus(status).error_details()));
  EXPECT_EQ(details.details_size(), 1);
  EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
}

TEST(GrpcStatusTest, DetailsThatAreNotOursAreLeftOut) {
  const grpc::Status foreign(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", "\x0a\xff garbage");
  EXPECT_EQ(FromGrpcStatus(foreign), absl::ResourceExhaustedError("full"));
}

}  // namespace
}  // namespace heavywater
