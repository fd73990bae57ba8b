#include "cache_service/runtime/trace_context.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "cache_service/runtime/logging.h"

namespace heavywater {
namespace {

const std::string kId = "4bf92f3577b34da6a3ce929d0e0e4736";
const std::string kHeader = "00-" + kId + "-00f067aa0ba902b7-01";

TEST(TraceIdTest, IsThatOfAHeaderOfThisOrALaterVersion) {
  EXPECT_EQ(TraceIdOf(kHeader), kId);
  EXPECT_EQ(TraceIdOf("cc" + kHeader.substr(2) + "-more"), kId);
}

TEST(TraceIdTest, OfWhatIsNoHeaderIsEmpty) {
  for (const std::string& header :
       {std::string(), std::string("00"), kHeader.substr(1), kHeader + "0", kHeader + "-more",
        "ff" + kHeader.substr(2), "00-" + std::string(32, '0') + kHeader.substr(35),
        "00-" + std::string(32, 'A') + kHeader.substr(35), std::string(55, '-'),
        "00-\"" + kId.substr(1) + kHeader.substr(35), std::string(100'000, 'a')}) {
    EXPECT_EQ(TraceIdOf(header), "") << header.substr(0, 60);
  }
}

TEST(TraceIdTest, ANewOneIsWellFormedAndNoOthers) {
  const std::string id = NewTraceId();
  EXPECT_EQ(TraceIdOf("00-" + id + "-00f067aa0ba902b7-01"), id);
  EXPECT_NE(NewTraceId(), id);
}

std::string LogLine() {
  testing::internal::CaptureStderr();
  LogWarn("something", {{"sequence", 7}});
  return testing::internal::GetCapturedStderr();
}

TEST(ScopedTraceTest, EndsTheLinesOfItsThreadAsLongAsItLives) {
  EXPECT_EQ(LogLine().find("trace="), std::string::npos);
  {
    const ScopedTrace trace(kId);
    EXPECT_NE(LogLine().find("something sequence=\"7\" trace=\"" + kId + "\""), std::string::npos);
    {
      const ScopedTrace inner("");
      EXPECT_EQ(LogLine().find("trace="), std::string::npos);
    }
    EXPECT_EQ(ScopedTrace::Current(), kId);
    std::thread([] { EXPECT_EQ(ScopedTrace::Current(), ""); }).join();
  }
  EXPECT_EQ(ScopedTrace::Current(), "");
}

TEST(ScopedTraceTest, IsAFieldOfJsonLines) {
  ASSERT_TRUE(InitLogging({.level = "info", .json = true, .process = "test"}).ok());
  const ScopedTrace trace(kId);
  EXPECT_NE(LogLine().find("\"sequence\":\"7\",\"trace\":\"" + kId + "\"}"), std::string::npos);
  ASSERT_TRUE(InitLogging({}).ok());
}

}  // namespace
}  // namespace heavywater
