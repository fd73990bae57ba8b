#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/bfloat16.h"
#include "cache_service/base/copy_bytes.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/executor.h"
#include "cache_service/base/float16.h"
#include "cache_service/base/mutex.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

uint32_t Crc(const std::string& text, uint32_t crc = 0) {
  return Crc32c(std::as_bytes(std::span<const char>(text)), crc);
}

TEST(Crc32cTest, EqualsThePublishedCheckValues) {
  EXPECT_EQ(Crc(""), 0u);
  EXPECT_EQ(Crc("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(Crc(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(Crc32cTest, PartsExtendToTheWhole) {
  const std::string text = "heavy water is a distributed H2O";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(Crc(text.substr(cut), Crc(text.substr(0, cut))), Crc(text)) << cut;
  }
}

TEST(Crc32cTest, LongTextsEqualThePiecesOfThemOneByteAtATime) {
  std::string text;
  for (uint32_t i = 0; i < 70'000; ++i) text.push_back(static_cast<char>(i * 2654435761u >> 24));
  for (const size_t size : {1535, 1536, 1537, 3071, 3072, 3073, 3079, 4607, 4608, 4609, 6143, 6144,
                            6149, 65'536, 70'000}) {
    uint32_t piecewise = 0;
    for (size_t i = 0; i < size; ++i) piecewise = Crc(text.substr(i, 1), piecewise);
    EXPECT_EQ(Crc(text.substr(0, size)), piecewise) << size;
  }
}

TEST(Crc32cTest, ACopyIsTheBytesAndItsChecksumTheirs) {
  std::vector<std::byte> from;
  for (uint32_t i = 0; i < 70'000; ++i) {
    from.push_back(static_cast<std::byte>(i * 2654435761u >> 24));
  }
  for (const size_t size : {0,    1,    8,    63,   191,  192,  193,  1535, 1536,  1537, 2047,
                            2048, 2049, 2111, 2112, 2113, 3071, 3072, 3073, 4095,  4096, 4097,
                            4607, 4608, 4609, 6143, 6144, 6149, 9216, 9999, 65'536}) {
    const auto source = std::span<const std::byte>(from).subspan(3, size);
    for (const size_t before : {1, 16, 63, 64}) {
      SCOPED_TRACE(absl::StrCat(size, " bytes, ", before, " into a line"));
      constexpr std::byte kOther{0xaa};
      const std::vector<std::byte> untouched(size + 3 * 64, kOther);
      const auto expect_copy = [&](auto copy) {
        std::vector<std::byte> to = untouched;
        const size_t at = -reinterpret_cast<uintptr_t>(to.data()) % 64 + before % 64;
        copy(to.data() + at);
        EXPECT_TRUE(std::equal(source.begin(), source.end(), to.begin() + at));
        EXPECT_TRUE(std::all_of(to.begin(), to.begin() + at, [](auto b) { return b == kOther; }));
        EXPECT_TRUE(
            std::all_of(to.begin() + at + size, to.end(), [](auto b) { return b == kOther; }));
      };
      const uint32_t crc = Crc32c(source, 0x1234);
      expect_copy([&](std::byte* to) { CopyBytes(source, to); });
      expect_copy([&](std::byte* to) { StoreBytes(source, to); });
      expect_copy([&](std::byte* to) { EXPECT_EQ(CopyWithCrc32c(source, to, 0x1234), crc); });
    }
  }
}

TEST(BFloat16Test, EveryValueSurvivesTheWayThroughFloat) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = BFloat16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(value)))) << bits;
    } else {
      EXPECT_EQ(FloatToBFloat16(value), bits);
    }
  }
}

TEST(BFloat16Test, RoundsToNearestAndTiesToEven) {
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // tie, even below
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x3f818000u)), 0x3f82);  // tie, even above
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  EXPECT_EQ(FloatToBFloat16(std::numeric_limits<float>::max()), 0x7f80) << "infinity";
}

TEST(Float16Test, EveryFiniteValueSurvivesTheWayThroughFloat) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = Float16ToFloat(static_cast<uint16_t>(bits));
    if ((bits & 0x7c00) == 0x7c00) {
      EXPECT_EQ(std::isnan(value), (bits & 0x3ff) != 0) << bits;
      EXPECT_EQ(std::isinf(value), (bits & 0x3ff) == 0) << bits;
    } else {
      const double significand = bits & 0x3ff;
      const int exponent = static_cast<int>(bits >> 10 & 0x1f);
      const double magnitude = exponent == 0 ? std::ldexp(significand, -24)
                                             : std::ldexp(significand + 1024, exponent - 25);
      ASSERT_EQ(value, (bits & 0x8000) != 0 ? -magnitude : magnitude) << bits;
      ASSERT_EQ(FloatToFloat16(value), bits);
    }
  }
}

TEST(Float16Test, RoundsToNearestAndTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float below = Float16ToFloat(static_cast<uint16_t>(bits));
    const float above = Float16ToFloat(static_cast<uint16_t>(bits + 1));
    const float middle = below + (above - below) / 2;
    ASSERT_EQ(FloatToFloat16(middle), bits + bits % 2);
    ASSERT_EQ(FloatToFloat16(std::nextafter(middle, below)), bits);
    ASSERT_EQ(FloatToFloat16(-std::nextafter(middle, above)), (bits + 1) | 0x8000);
  }
}

TEST(Float16Test, WhatIsTooLargeBecomesTheLargestFiniteValue) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {65504.0f, 65519.0f, 65520.0f, 1e30f, infinity}) {
    EXPECT_EQ(Float16ToFloat(FloatToFloat16(value)), kMaxFloat16) << value;
    EXPECT_EQ(Float16ToFloat(FloatToFloat16(-value)), -kMaxFloat16) << value;
  }
  EXPECT_TRUE(std::isnan(Float16ToFloat(FloatToFloat16(std::nanf("")))));
}

TEST(ExecutorTest, AThreadRunsTasksInOrderAndTheRestBeforeItEnds) {
  std::vector<int> order;
  {
    ThreadExecutor executor(/*max_queued=*/100);
    for (int i = 0; i < 50; ++i) {
      ASSERT_TRUE(executor.Schedule([&order, i] { order.push_back(i); }).ok());
    }
  }
  ASSERT_EQ(order.size(), 50u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(ExecutorTest, AFullQueueRefusesNamingItsBound) {
  ManualExecutor executor(/*max_queued=*/2);
  int runs = 0;
  EXPECT_TRUE(executor.Schedule([&] { ++runs; }).ok());
  EXPECT_TRUE(executor.Schedule([&] { ++runs; }).ok());
  const absl::Status full = executor.Schedule([&] { ++runs; });
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("2 tasks"), absl::string_view::npos);
  EXPECT_TRUE(executor.RunOne());
  EXPECT_EQ(runs, 1);
  executor.RunAll();
  EXPECT_EQ(runs, 2);
  EXPECT_FALSE(executor.RunOne());
}

TEST(MutexTest, WaitWithTimeoutTellsATimeoutFromASignal) {
  Mutex mutex;
  CondVar changed;
  bool done = false;
  {
    MutexLock lock(&mutex);
    EXPECT_TRUE(changed.WaitWithTimeout(&mutex, absl::Milliseconds(5)));
  }
  std::thread other([&] {
    MutexLock lock(&mutex);
    done = true;
    changed.SignalAll();
  });
  {
    MutexLock lock(&mutex);
    while (!done) changed.Wait(&mutex);
  }
  other.join();
  EXPECT_TRUE(done);
}

absl::StatusOr<int> Half(int value) {
  if (value % 2 != 0) return absl::InvalidArgumentError("odd");
  return value / 2;
}

absl::StatusOr<int> Quarter(int value) {
  HW_ASSIGN_OR_RETURN(const int half, Half(value));
  HW_RETURN_IF_ERROR(Half(half).status());
  return half / 2;
}

TEST(StatusTest, TheMacrosReturnTheFirstError) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Quarter(6).status().message(), "odd");
  EXPECT_EQ(Quarter(3).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace heavywater
