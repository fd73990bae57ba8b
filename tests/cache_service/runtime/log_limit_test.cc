#include "cache_service/runtime/log_limit.h"

#include <gtest/gtest.h>

namespace heavywater {
namespace {

TEST(LogLimitTest, AllowsSoManyLinesASecondAndCountsTheOthers) {
  LogLimit limit(3);
  const absl::Time start = absl::UnixEpoch();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(limit.Allow(start), 0) << i;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(limit.Allow(start), std::nullopt) << i;
  EXPECT_EQ(limit.Allow(start + absl::Milliseconds(400)), 5);
  EXPECT_EQ(limit.Allow(start + absl::Milliseconds(400)), std::nullopt);
  // However long nothing was written, no more than a second's worth comes at once.
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(limit.Allow(start + absl::Hours(1)).has_value()) << i;
  EXPECT_EQ(limit.Allow(start + absl::Hours(1)), std::nullopt);
}

}  // namespace
}  // namespace heavywater
