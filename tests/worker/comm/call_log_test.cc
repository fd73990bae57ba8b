#include "worker/comm/nccl/call_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace heavywater {
namespace {

using ::testing::HasSubstr;

CallHeader Sum(int64_t length, uint64_t sequence, CallType type = CallType::kFloat32) {
  CallHeader call;
  call.op = CallOp::kAllReduceSum;
  call.type = type;
  call.sequence = sequence;
  call.length = length;
  return call;
}

TEST(CallLogTest, KnowsACallByOperationTypeAndLength) {
  CallLog log;
  log.AddKnown(Sum(5, 1));
  EXPECT_TRUE(log.IsKnown(Sum(5, 99)));
  EXPECT_FALSE(log.IsKnown(Sum(6, 99)));
  EXPECT_FALSE(log.IsKnown(Sum(5, 99, CallType::kInt64)));
  CallHeader gather = Sum(5, 99);
  gather.op = CallOp::kAllGather;
  EXPECT_FALSE(log.IsKnown(gather));
}

TEST(CallLogTest, ForgetsRatherThanGrowsWithoutBound) {
  CallLog log;
  for (size_t i = 0; i <= CallLog::kMaxKnown; ++i) log.AddKnown(Sum(static_cast<int64_t>(i), 1));
  EXPECT_FALSE(log.IsKnown(Sum(0, 1)));
  EXPECT_TRUE(log.IsKnown(Sum(CallLog::kMaxKnown, 1)));
}

TEST(CallLogTest, IsFullAfterTheMostCallsAndEmptyOnceCleared) {
  CallLog log;
  for (size_t i = 1; i < CallLog::kMaxCalls; ++i) log.Record(Sum(1, i));
  EXPECT_FALSE(log.full());
  log.Record(Sum(1, CallLog::kMaxCalls));
  EXPECT_TRUE(log.full());
  log.Clear();
  EXPECT_TRUE(log.empty());
}

TEST(CallLogTest, TheDigestTellsLengthsTypesAndOrderApart) {
  const auto digest = [](std::vector<CallHeader> calls) {
    CallLog log;
    for (const CallHeader& call : calls) log.Record(call);
    return log.Digest();
  };
  const int64_t want = digest({Sum(7, 1), Sum(5, 2)});
  EXPECT_EQ(digest({Sum(7, 11), Sum(5, 12)}), want);  // numbers are compared elsewhere
  EXPECT_NE(digest({Sum(5, 1), Sum(7, 2)}), want);
  EXPECT_NE(digest({Sum(7, 1)}), want);
  EXPECT_NE(digest({Sum(7, 1), Sum(6, 2)}), want);
  EXPECT_NE(digest({Sum(7, 1), Sum(5, 2, CallType::kInt64)}), want);
}

TEST(CompareLogsTest, NamesTheFirstCallsThatDiffer) {
  const std::vector<std::vector<CallHeader>> logs = {
      {Sum(1, 4), Sum(7, 5), Sum(3, 6)}, {Sum(1, 4), Sum(5, 5)}, {Sum(1, 4), Sum(7, 5)}};
  const absl::Status status = CompareLogs(logs);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("ranks 0,2: AllReduceSum of 7 float32 (call 5); "
                        "rank 1: AllReduceSum of 5 float32 (call 5)"));
}

TEST(CompareLogsTest, CountsTheCallsWhenOneRankMadeFewer) {
  const std::vector<std::vector<CallHeader>> logs = {{Sum(1, 4), Sum(7, 5)}, {Sum(1, 4)}};
  const absl::Status status = CompareLogs(logs);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("2, 1"));
}

TEST(CompareLogsTest, AcceptsEqualLogs) {
  EXPECT_TRUE(CompareLogs(std::vector<std::vector<CallHeader>>(3, {Sum(1, 4), Sum(7, 5)})).ok());
}

}  // namespace
}  // namespace heavywater
