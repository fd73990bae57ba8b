#include "worker/comm/call_contract.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "worker/comm/communicator.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

std::vector<CallHeader> Ranks(int size, CallOp op, CallType type, int64_t length) {
  std::vector<CallHeader> headers(size);
  for (int rank = 0; rank < size; ++rank) {
    headers[rank].op = op;
    headers[rank].type = type;
    headers[rank].rank = rank;
    headers[rank].sequence = 12;
    headers[rank].length = length;
  }
  return headers;
}

TEST(CheckCallsTest, AcceptsTheSameCallOnEveryRank) {
  EXPECT_TRUE(CheckCalls(Ranks(4, CallOp::kAllReduceSum, CallType::kFloat32, 5)).ok());
}

TEST(CheckCallsTest, NamesBothLengthsAndWhoseTheyAre) {
  auto headers = Ranks(3, CallOp::kAllReduceSum, CallType::kFloat32, 409598);
  headers[0].length = 409600;
  const absl::Status status = CheckCalls(headers);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("got rank 0: AllReduceSum of 409600 float32 (call 12); "
                        "ranks 1,2: AllReduceSum of 409598 float32 (call 12)"));
}

TEST(CheckCallsTest, NamesBothTypes) {
  auto headers = Ranks(2, CallOp::kAllReduceSum, CallType::kFloat32, 4);
  headers[1].type = CallType::kInt64;
  const std::string message(CheckCalls(headers).message());
  EXPECT_THAT(message, HasSubstr("float32"));
  EXPECT_THAT(message, HasSubstr("int64"));
}

TEST(CheckCallsTest, NamesBothCallNumbers) {
  auto headers = Ranks(2, CallOp::kBarrier, CallType::kNone, 0);
  headers[1].sequence = 13;
  const std::string message(CheckCalls(headers).message());
  EXPECT_THAT(message, HasSubstr("rank 0: Barrier (call 12)"));
  EXPECT_THAT(message, HasSubstr("rank 1: Barrier (call 13)"));
}

TEST(CheckCallsTest, TakesABroadcastsLengthFromTheRootAlone) {
  auto headers = Ranks(3, CallOp::kBroadcast, CallType::kByte, 0);
  for (CallHeader& header : headers) header.root = 1;
  headers[1].length = 1000;
  EXPECT_TRUE(CheckCalls(headers).ok());
  headers[2].root = 2;
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckCalls(headers)));
}

TEST(CheckCallsTest, RefusesABroadcastAboveTheLimit) {
  auto headers = Ranks(2, CallOp::kBroadcast, CallType::kByte, 0);
  for (CallHeader& header : headers) header.root = 0;
  headers[0].length = kMaxBroadcastBytes;
  EXPECT_TRUE(CheckCalls(headers).ok());
  headers[0].length = kMaxBroadcastBytes + 1;
  EXPECT_TRUE(absl::IsInvalidArgument(CheckCalls(headers)));
}

TEST(CheckCallsTest, SaysWhoHasLeft) {
  auto headers = Ranks(3, CallOp::kBarrier, CallType::kNone, 0);
  headers[2].op = CallOp::kLeave;
  const absl::Status status = CheckCalls(headers);
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 2 has left"));
}

TEST(CheckCallsTest, RefusesAMessageOfAnotherFormat) {
  auto headers = Ranks(2, CallOp::kBarrier, CallType::kNone, 0);
  headers[1].magic = 1;
  const absl::Status status = CheckCalls(headers);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1: a message of another format"));
}

}  // namespace
}  // namespace heavywater
