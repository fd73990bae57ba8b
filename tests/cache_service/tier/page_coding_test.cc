// Pages at 8 bits: the coding itself, and pages that go down and come up by it.
#include "cache_service/tier/page_coding.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/float16.h"
#include "tests/cache_service/tier/ordered_store_fixture.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr int kTokens = 64;
constexpr int kChannels = 32;
// The largest error of a rounded number, relative to it.
constexpr double kRounding[] = {0, 1.0 / 256, 1.0 / 2048, 1.0 / (1 << 24)};

int64_t SizeOf(PageDtype dtype) { return dtype == PageDtype::kFp32 ? 4 : 2; }

PageGeometry GeometryOf(PageDtype dtype) {
  return {.num_layers = 1,
          .num_kv_heads = 1,
          .page_tokens = kTokens,
          .row_bytes = static_cast<int>(2 * kChannels * SizeOf(dtype))};
}

// [kTokens][K, then V][kChannels], as float; what the type makes of them.
class Numbers {
 public:
  float& At(int token, int channel, bool v) {
    return values_[(token * 2 + (v ? 1 : 0)) * kChannels + channel];
  }
  std::vector<std::byte> ToPage(PageDtype dtype) const {
    std::vector<std::byte> page(values_.size() * SizeOf(dtype));
    for (size_t i = 0; i < values_.size(); ++i) {
      std::byte* const to = page.data() + i * SizeOf(dtype);
      const uint16_t half =
          dtype == PageDtype::kBf16 ? FloatToBFloat16(values_[i]) : FloatToFloat16(values_[i]);
      if (dtype == PageDtype::kFp32) {
        std::memcpy(to, &values_[i], 4);
      } else {
        std::memcpy(to, &half, 2);
      }
    }
    return page;
  }
  static Numbers FromPage(std::span<const std::byte> page, PageDtype dtype) {
    Numbers numbers;
    for (size_t i = 0; i < numbers.values_.size(); ++i) {
      const std::byte* const from = page.data() + i * SizeOf(dtype);
      uint16_t half = 0;
      std::memcpy(&half, from, 2);
      if (dtype == PageDtype::kFp32) {
        std::memcpy(&numbers.values_[i], from, 4);
      } else {
        numbers.values_[i] =
            dtype == PageDtype::kBf16 ? BFloat16ToFloat(half) : Float16ToFloat(half);
      }
    }
    return numbers;
  }

 private:
  std::vector<float> values_ = std::vector<float>(2 * kTokens * kChannels);
};

class PageCodingTest : public ::testing::TestWithParam<PageDtype> {
 protected:
  PageCodingTest() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 2);
    for (int token = 0; token < kTokens; ++token) {
      for (int channel = 0; channel < kChannels; ++channel) {
        for (const bool v : {false, true}) numbers_.At(token, channel, v) = normal(random);
      }
    }
  }
  // There and back.
  Numbers Code() {
    const std::vector<std::byte> page = numbers_.ToPage(GetParam());
    std::vector<std::byte> coded(CodedBytes(geometry_, GetParam()));
    const absl::Status encoded = EncodePage(geometry_, GetParam(), page, coded);
    EXPECT_TRUE(encoded.ok()) << encoded;
    std::vector<std::byte> back(page.size());
    const absl::Status decoded = DecodePage(geometry_, GetParam(), coded, back);
    EXPECT_TRUE(decoded.ok()) << decoded;
    given_ = Numbers::FromPage(page, GetParam());
    return Numbers::FromPage(back, GetParam());
  }
  // Each number is at most half a step away, by the range of its K channel or its V token.
  void ExpectWithinHalfAStep(Numbers& got) {
    for (int i = 0; i < kTokens * kChannels; ++i) {
      const int token = i / kChannels;
      const int channel = i % kChannels;
      double k_low = 1e300, k_high = -1e300, v_low = 1e300, v_high = -1e300;
      for (int other = 0; other < kTokens; ++other) {
        k_low = std::min<double>(k_low, given_.At(other, channel, false));
        k_high = std::max<double>(k_high, given_.At(other, channel, false));
      }
      for (int other = 0; other < kChannels; ++other) {
        v_low = std::min<double>(v_low, given_.At(token, other, true));
        v_high = std::max<double>(v_high, given_.At(token, other, true));
      }
      for (const bool v : {false, true}) {
        const double low = v ? v_low : k_low;
        const double high = v ? v_high : k_high;
        const double most = std::max(std::abs(low), std::abs(high));
        const double limit =
            (high - low) / 510 * 1.001 + most * (kRounding[static_cast<int>(GetParam())] + 1e-6);
        ASSERT_TRUE(std::isfinite(got.At(token, channel, v)));
        ASSERT_LE(
            std::abs(static_cast<double>(got.At(token, channel, v)) - given_.At(token, channel, v)),
            limit)
            << "token " << token << " channel " << channel << (v ? " of V" : " of K");
      }
    }
  }

  const PageGeometry geometry_ = GeometryOf(GetParam());
  Numbers numbers_;
  Numbers given_;  // as the type has them
};

INSTANTIATE_TEST_SUITE_P(Types, PageCodingTest,
                         ::testing::Values(PageDtype::kBf16, PageDtype::kFp16, PageDtype::kFp32));

TEST_P(PageCodingTest, RandomNumbersComeBackWithinHalfAStep) {
  Numbers got = Code();
  ExpectWithinHalfAStep(got);
  const double ratio = static_cast<double>(CodedBytes(geometry_, GetParam())) /
                       static_cast<double>(geometry_.page_bytes());
  EXPECT_LT(ratio, GetParam() == PageDtype::kFp32 ? 0.36 : 0.72) << "small pages, large ranges";
}

TEST_P(PageCodingTest, ConstantAndZeroChannelsAndTokensComeBackAsTheyWere) {
  for (int token = 0; token < kTokens; ++token) {
    numbers_.At(token, 3, false) = 0;
    numbers_.At(token, 4, false) = -1.25f;
  }
  for (int channel = 0; channel < kChannels; ++channel) {
    numbers_.At(5, channel, true) = 0;
    numbers_.At(6, channel, true) = 0.375f;
  }
  Numbers got = Code();
  ExpectWithinHalfAStep(got);
  for (int token = 0; token < kTokens; ++token) {
    EXPECT_EQ(got.At(token, 3, false), 0);
    EXPECT_EQ(got.At(token, 4, false), -1.25f);
  }
  for (int channel = 0; channel < kChannels; ++channel) {
    EXPECT_EQ(got.At(5, channel, true), 0);
    EXPECT_EQ(got.At(6, channel, true), 0.375f);
  }
}

TEST_P(PageCodingTest, AChannelThatStandsOutCostsTheOthersNothing) {
  for (int token = 0; token < kTokens; ++token) numbers_.At(token, 9, false) *= 1000;
  Numbers got = Code();
  ExpectWithinHalfAStep(got);
  double worst = 0;
  for (int token = 0; token < kTokens; ++token) {
    worst = std::max<double>(worst, std::abs(got.At(token, 8, false) - given_.At(token, 8, false)));
  }
  EXPECT_LT(worst, 0.06) << "the step of its own range, not of the loud channel's";
}

TEST_P(PageCodingTest, TheLargestNumbersOfTheTypeStayFinite) {
  const float most = GetParam() == PageDtype::kFp16   ? kMaxFloat16
                     : GetParam() == PageDtype::kBf16 ? BFloat16ToFloat(0x7f7f)
                                                      : std::numeric_limits<float>::max();
  for (int token = 0; token < kTokens; ++token) {
    numbers_.At(token, 1, false) = token % 2 == 0 ? most : -most;
    numbers_.At(token, 2, true) = token % 3 == 0 ? most : 0;
  }
  Numbers got = Code();
  ExpectWithinHalfAStep(got);
}

TEST_P(PageCodingTest, ANanOrAnInfinityIsRefusedNamingItsPlace) {
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::infinity()};
  for (const float value : bad) {
    std::vector<std::byte> page = numbers_.ToPage(GetParam());
    const uint16_t half = GetParam() == PageDtype::kBf16 ? FloatToBFloat16(value)
                          : std::isnan(value)            ? 0x7e00
                                                         : 0x7c00;
    std::byte* const at =
        page.data() + geometry_.row_bytes * 5 + (kChannels + 7) * SizeOf(GetParam());
    if (GetParam() == PageDtype::kFp32) {
      std::memcpy(at, &value, 4);
    } else {
      std::memcpy(at, &half, 2);
    }
    std::vector<std::byte> coded(CodedBytes(geometry_, GetParam()));
    const absl::Status status = EncodePage(geometry_, GetParam(), page, coded);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("row 5, channel 7 of V"));
  }
}

TEST_P(PageCodingTest, AnyBytesDecodeToFiniteNumbersOrAreRefused) {
  std::mt19937 random(11);
  std::vector<std::byte> coded(CodedBytes(geometry_, GetParam()));
  std::vector<std::byte> page(geometry_.page_bytes());
  for (int round = 0; round < 50; ++round) {
    for (std::byte& byte : coded) byte = static_cast<std::byte>(random());
    if (!DecodePage(geometry_, GetParam(), coded, page).ok()) continue;
    Numbers got = Numbers::FromPage(page, GetParam());
    for (int i = 0; i < kTokens * kChannels; ++i) {
      ASSERT_TRUE(std::isfinite(got.At(i / kChannels, i % kChannels, false)));
      ASSERT_TRUE(std::isfinite(got.At(i / kChannels, i % kChannels, true)));
    }
  }
  coded.pop_back();
  EXPECT_EQ(DecodePage(geometry_, GetParam(), coded, page).code(),
            absl::StatusCode::kInvalidArgument);
}

// Pages of bf16 numbers through the tiers.
class CodedTiersTest : public OrderedStoreFixture {
 protected:
  void SetUp() override { code_pages_ = true; }
  std::vector<std::byte> Rows(int64_t page, bool with_nan = false) const {
    std::mt19937 random(static_cast<uint32_t>(page));
    std::normal_distribution<float> normal(1, 3);
    std::vector<std::byte> rows(kTestPageBytes);
    for (int64_t at = 0; at < kTestPageBytes; at += 2) {
      const uint16_t bits = FloatToBFloat16(normal(random));
      std::memcpy(rows.data() + at, &bits, 2);
    }
    const uint16_t nan = 0x7fc0;
    if (with_nan) std::memcpy(rows.data() + 100, &nan, 2);
    return rows;
  }
  // Of one layer and head; page 1 has a NaN if asked for.
  void Fill(SequenceId sequence, int64_t pages, PageDtype dtype, bool with_nan = false) {
    ASSERT_TRUE(store_
                    ->Open({.sequence = sequence,
                            .fingerprint = kFingerprint,
                            .geometry = kTestGeometry,
                            .max_tokens = 1000,
                            .dtype = dtype})
                    .ok());
    ASSERT_TRUE(
        store_->Reserve({.sequence = sequence, .heads = {0, 1}, .num_pages = pages}, false).ok());
    for (int layer = 0; layer < 2; ++layer) {
      for (int64_t page = 0; page < pages; ++page) {
        ASSERT_TRUE(
            store_->Write(0, {sequence, layer, 0, page * 16, 16}, Rows(page, with_nan && page == 1))
                .ok());
      }
    }
    ASSERT_TRUE(store_->Commit(sequence, 0, pages * 16).ok());
    store_->StopWriter(sequence, 0);
    while (store_->FlushBatch(sequence) > 0) {
    }
    ASSERT_EQ(store_->HostBytes(sequence), 0);
  }
  void TurnCoded() {
    while (store_->Turn()) {
    }
  }
  std::vector<std::byte> Read(SequenceId sequence, int64_t page) {
    std::vector<std::byte> rows(kTestPageBytes);
    const absl::Status read = store_->Read({sequence, 1, 0, page * 16, 16}, rows);
    EXPECT_TRUE(read.ok()) << read;
    return rows;
  }
  static std::vector<std::byte> ThereAndBack(const std::vector<std::byte>& rows) {
    std::vector<std::byte> coded(CodedBytes(kTestGeometry, PageDtype::kBf16));
    std::vector<std::byte> back(rows.size());
    EXPECT_TRUE(EncodePage(kTestGeometry, PageDtype::kBf16, rows, coded).ok());
    EXPECT_TRUE(DecodePage(kTestGeometry, PageDtype::kBf16, coded, back).ok());
    return back;
  }
  static double WorstError(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
    double worst = 0;
    for (size_t at = 0; at < a.size(); at += 2) {
      uint16_t x = 0, y = 0;
      std::memcpy(&x, a.data() + at, 2);
      std::memcpy(&y, b.data() + at, 2);
      worst = std::max<double>(worst, std::abs(BFloat16ToFloat(x) - BFloat16ToFloat(y)));
    }
    return worst;
  }
};

TEST_F(CodedTiersTest, PagesTakeLessRoomBelowAndComeUpNearToWhatTheyWere) {
  Make(100);
  Fill(1, 3, PageDtype::kBf16);
  EXPECT_EQ(Disk().pages, 6);
  EXPECT_LT(Disk().used_bytes, 6 * kTestPageBytes * 7 / 10);
  const double error = WorstError(Read(1, 2), Rows(2));
  EXPECT_GT(error, 0) << "it was coded";
  EXPECT_LT(error, 0.1) << "of numbers from -8 to 10";
  const std::vector<std::byte> first = Read(1, 0);
  ASSERT_TRUE(store_->BringUp(1).ok());
  EXPECT_EQ(store_->HostBytes(1), 6 * kTestPageBytes);
  EXPECT_EQ(Read(1, 0), first) << "in the slab it is checked by a checksum of its own";
  EXPECT_EQ(store_->Stats().checksum_failures, 0);
}

TEST_F(CodedTiersTest, FromTierToTierItIsNotCodedAgain) {
  Make(100, /*disk_pages=*/4);
  Fill(1, 3, PageDtype::kBf16);
  TurnCoded();
  ASSERT_GT(Disk().moved_down, 0);
  ASSERT_GT(Remote().pages, 0);
  for (int64_t page = 0; page < 3; ++page) EXPECT_EQ(Read(1, page), ThereAndBack(Rows(page)));
  EXPECT_EQ(Disk().failures.corrupt + Remote().failures.corrupt, 0);
}

TEST_F(CodedTiersTest, APageWithANanGoesDownAsItIs) {
  Make(100);
  Fill(1, 3, PageDtype::kBf16, /*with_nan=*/true);
  EXPECT_EQ(Read(1, 1), Rows(1, /*with_nan=*/true));
  EXPECT_NE(Read(1, 0), Rows(0));
}

TEST_F(CodedTiersTest, OpaqueBytesAreNeverCoded) {
  Make(100);
  Fill(1, 3, PageDtype::kOpaque);
  EXPECT_EQ(Read(1, 2), Rows(2));
}

}  // namespace
}  // namespace heavywater
