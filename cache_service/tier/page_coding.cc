#include "cache_service/tier/page_coding.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/bfloat16.h"
#include "cache_service/base/float16.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr int kSteps = 255;

// Of one channel's or one token's numbers: float32, both finite.
struct Range {
  float min = 0;
  float step = 0;
};

int64_t SizeOf(PageDtype dtype) { return dtype == PageDtype::kFp32 ? 4 : 2; }

// What a page holds, as numbers: [rows][channels] of K, and likewise of V.
struct Shape {
  Shape(const PageGeometry& geometry, PageDtype type)
      : rows(geometry.page_tokens), channels(geometry.row_bytes / SizeOf(type) / 2), dtype(type) {}
  int64_t num_numbers() const { return rows * channels; }  // of K
  int64_t ranges_bytes() const { return (channels + rows) * static_cast<int64_t>(sizeof(Range)); }

  int64_t rows;
  int64_t channels;
  PageDtype dtype;
};

float Load(const std::byte* from, PageDtype dtype) {
  if (dtype == PageDtype::kFp32) {
    float value = 0;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, from, sizeof(bits));
  return dtype == PageDtype::kBf16 ? BFloat16ToFloat(bits) : Float16ToFloat(bits);
}

// Within the type's finite numbers: what rounds beyond them is the last one.
void Store(float value, PageDtype dtype, std::byte* to) {
  if (dtype == PageDtype::kFp32) {
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  uint16_t bits = dtype == PageDtype::kBf16 ? FloatToBFloat16(value) : FloatToFloat16(value);
  if (dtype == PageDtype::kBf16 && (bits & 0x7fffu) == 0x7f80u) --bits;
  std::memcpy(to, &bits, sizeof(bits));
}

Range RangeOf(float min, float max) {
  // In double: two finite floats may lie further apart than a float reaches.
  return {min, static_cast<float>((static_cast<double>(max) - min) / kSteps)};
}

uint8_t CodeOf(float value, const Range& range) {
  if (range.step == 0) return 0;
  const double code = (static_cast<double>(value) - range.min) / range.step;
  return static_cast<uint8_t>(std::clamp<double>(std::nearbyint(code), 0, kSteps));
}

float NumberOf(uint8_t code, const Range& range) {
  const double value = static_cast<double>(range.min) + code * static_cast<double>(range.step);
  constexpr double kMax = 3.4028234663852886e38;
  return static_cast<float>(std::clamp(value, -kMax, kMax));
}

// [2][rows][channels]: K, then V. INVALID_ARGUMENT: not all are finite.
absl::Status Unpack(const Shape& shape, std::span<const std::byte> page,
                    std::vector<float>* numbers) {
  numbers->resize(2 * shape.num_numbers());
  const std::byte* from = page.data();
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t i = 0; i < 2 * shape.channels; ++i, from += SizeOf(shape.dtype)) {
      const float value = Load(from, shape.dtype);
      const bool is_v = i >= shape.channels;
      if (!std::isfinite(value)) {
        return absl::InvalidArgumentError(absl::StrCat("row ", row, ", channel ",
                                                       i % shape.channels, " of ", is_v ? "V" : "K",
                                                       " is ", value, ", want a finite number"));
      }
      const int64_t at = row * shape.channels + i % shape.channels;
      (*numbers)[is_v * shape.num_numbers() + at] = value;
    }
  }
  return absl::OkStatus();
}

// By channel of K, then by token of V.
std::vector<Range> RangesOf(const Shape& shape, const std::vector<float>& numbers) {
  std::vector<Range> ranges;
  ranges.reserve(shape.channels + shape.rows);
  const float* const k = numbers.data();
  std::vector<float> min(k, k + shape.channels);
  std::vector<float> max = min;
  for (int64_t row = 1; row < shape.rows; ++row) {
    for (int64_t channel = 0; channel < shape.channels; ++channel) {
      const float value = k[row * shape.channels + channel];
      min[channel] = std::min(min[channel], value);
      max[channel] = std::max(max[channel], value);
    }
  }
  for (int64_t channel = 0; channel < shape.channels; ++channel) {
    ranges.push_back(RangeOf(min[channel], max[channel]));
  }
  const float* const v = k + shape.num_numbers();
  for (int64_t row = 0; row < shape.rows; ++row) {
    const auto [low, high] =
        std::minmax_element(v + row * shape.channels, v + (row + 1) * shape.channels);
    ranges.push_back(RangeOf(*low, *high));
  }
  return ranges;
}

absl::Status CheckSizes(const PageGeometry& geometry, PageDtype dtype, size_t page, size_t coded) {
  const int64_t want = CodedBytes(geometry, dtype);
  if (!IsCoded(geometry, dtype)) {
    return absl::InvalidArgumentError("the page's numbers are opaque, want a type of them");
  }
  if (static_cast<int64_t>(page) == geometry.page_bytes() && static_cast<int64_t>(coded) == want) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("page has ", page, " bytes and ", coded,
                                                 " coded, want ", geometry.page_bytes(), " and ",
                                                 want));
}

}  // namespace

PageDtype PageDtypeOf(absl::string_view name) {
  if (name == "bf16") return PageDtype::kBf16;
  if (name == "fp16") return PageDtype::kFp16;
  return name == "fp32" ? PageDtype::kFp32 : PageDtype::kOpaque;
}

int64_t CodedBytes(const PageGeometry& geometry, PageDtype dtype) {
  if (dtype == PageDtype::kOpaque || geometry.row_bytes % (2 * SizeOf(dtype)) != 0) {
    return geometry.page_bytes();
  }
  const Shape shape(geometry, dtype);
  return std::min(geometry.page_bytes(), 2 * shape.num_numbers() + shape.ranges_bytes());
}

absl::Status EncodePage(const PageGeometry& geometry, PageDtype dtype,
                        std::span<const std::byte> page, std::span<std::byte> coded) {
  HW_RETURN_IF_ERROR(CheckSizes(geometry, dtype, page.size(), coded.size()));
  const Shape shape(geometry, dtype);
  std::vector<float> numbers;
  HW_RETURN_IF_ERROR(Unpack(shape, page, &numbers));
  const std::vector<Range> ranges = RangesOf(shape, numbers);
  std::memcpy(coded.data(), ranges.data(), shape.ranges_bytes());
  auto* code = reinterpret_cast<uint8_t*>(coded.data() + shape.ranges_bytes());
  const float* number = numbers.data();
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t channel = 0; channel < shape.channels; ++channel) {
      *code++ = CodeOf(*number++, ranges[channel]);
    }
  }
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t channel = 0; channel < shape.channels; ++channel) {
      *code++ = CodeOf(*number++, ranges[shape.channels + row]);
    }
  }
  return absl::OkStatus();
}

absl::Status DecodePage(const PageGeometry& geometry, PageDtype dtype,
                        std::span<const std::byte> coded, std::span<std::byte> page) {
  HW_RETURN_IF_ERROR(CheckSizes(geometry, dtype, page.size(), coded.size()));
  const Shape shape(geometry, dtype);
  std::vector<Range> ranges(shape.channels + shape.rows);
  std::memcpy(ranges.data(), coded.data(), shape.ranges_bytes());
  for (const Range& range : ranges) {
    if (!std::isfinite(range.min) || !std::isfinite(range.step)) {
      return absl::DataLossError("a coded page has a range that is not finite");
    }
  }
  const auto* k = reinterpret_cast<const uint8_t*>(coded.data() + shape.ranges_bytes());
  const uint8_t* v = k + shape.num_numbers();
  std::byte* to = page.data();
  const int64_t size = SizeOf(dtype);
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t channel = 0; channel < shape.channels; ++channel, to += size) {
      Store(NumberOf(*k++, ranges[channel]), dtype, to);
    }
    for (int64_t channel = 0; channel < shape.channels; ++channel, to += size) {
      Store(NumberOf(*v++, ranges[shape.channels + row]), dtype, to);
    }
  }
  return absl::OkStatus();
}

}  // namespace heavywater
