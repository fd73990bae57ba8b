#include "cache_service/base/shortage.h"

#include "gtest/gtest.h"

namespace heavywater {
namespace {

TEST(ShortageTest, GoesWithItsStatusAndIsFoundThere) {
  const absl::Status status = ExhaustedError("full", {.subject = "a limit, with words",
                                                      .need = int64_t{1} << 60,
                                                      .available = 0,
                                                      .limit = 7,
                                                      .retry_after = absl::Milliseconds(250)});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "full");
  const auto shortage = ShortageOf(status);
  ASSERT_TRUE(shortage.has_value());
  EXPECT_EQ(shortage->subject, "a limit, with words");
  EXPECT_EQ(shortage->need, int64_t{1} << 60);
  EXPECT_EQ(shortage->available, 0);
  EXPECT_EQ(shortage->limit, 7);
  EXPECT_EQ(shortage->retry_after, absl::Milliseconds(250));
}

TEST(ShortageTest, WithoutATimeWaitingDoesNotHelp) {
  EXPECT_EQ(ShortageOf(ExhaustedError("full", {.subject = "x"}))->retry_after,
            absl::InfiniteDuration());
  EXPECT_FALSE(ShortageOf(absl::ResourceExhaustedError("full")).has_value());
}

}  // namespace
}  // namespace heavywater
