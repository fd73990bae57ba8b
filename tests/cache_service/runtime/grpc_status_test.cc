#include "cache_service/runtime/grpc_status.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace heavywater
