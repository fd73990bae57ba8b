#include "worker/model/utf8.h"

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

// What a lead byte asks for (Unicode, table 3-7): only the second byte's range
// depends on it.
struct Lead {
  int bytes;
  unsigned char second_low, second_high;
};

Lead LeadOf(unsigned char byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xc2) return {0, 0, 0};
  if (byte < 0xe0) return {2, 0x80, 0xbf};
  if (byte == 0xe0) return {3, 0xa0, 0xbf};
  if (byte == 0xed) return {3, 0x80, 0x9f};  // no surrogates
  if (byte < 0xf0) return {3, 0x80, 0xbf};
  if (byte == 0xf0) return {4, 0x90, 0xbf};
  if (byte < 0xf4) return {4, 0x80, 0xbf};
  if (byte == 0xf4) return {4, 0x80, 0x8f};  // up to U+10FFFF
  return {0, 0, 0};
}

}  // namespace

Utf8Step DecodeUtf8(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const Lead lead = LeadOf(first);
  if (lead.bytes == 0) return {Utf8Step::kInvalid, 1, 0};
  if (lead.bytes == 1) return {Utf8Step::kValid, 1, first};
  char32_t code_point = first & (0x7fu >> lead.bytes);
  for (int i = 1; i < lead.bytes; ++i) {
    if (static_cast<size_t>(i) == text.size()) return {Utf8Step::kIncomplete, i, 0};
    const auto byte = static_cast<unsigned char>(text[static_cast<size_t>(i)]);
    const unsigned char low = i == 1 ? lead.second_low : 0x80;
    const unsigned char high = i == 1 ? lead.second_high : 0xbf;
    if (byte < low || byte > high) return {Utf8Step::kInvalid, i, 0};
    code_point = code_point << 6 | (byte & 0x3fu);
  }
  return {Utf8Step::kValid, lead.bytes, code_point};
}

absl::Status CheckUtf8(std::string_view what, std::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    const Utf8Step step = DecodeUtf8(text.substr(offset));
    if (step.kind != Utf8Step::kValid) {
      return absl::InvalidArgumentError(Message(what, " is not UTF-8 at byte ", offset));
    }
    offset += static_cast<size_t>(step.bytes);
  }
  return absl::OkStatus();
}

absl::Status CheckText(std::string_view what, std::string_view text) {
  if (text.size() <= kMaxTextBytes) return CheckUtf8(what, text);
  return absl::InvalidArgumentError(
      Message(what, " has ", text.size(), " bytes, limit ", kMaxTextBytes));
}

void AppendUtf8(char32_t code_point, std::string& text) {
  HW_CHECK(code_point <= 0x10ffff);
  const auto append = [&text](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  const auto tail = [&](int shift) { append(0x80 | (code_point >> shift & 0x3f)); };
  if (code_point < 0x80) return append(code_point);
  if (code_point < 0x800) {
    append(0xc0 | code_point >> 6);
    return tail(0);
  }
  if (code_point < 0x10000) {
    append(0xe0 | code_point >> 12);
    tail(6);
    return tail(0);
  }
  append(0xf0 | code_point >> 18);
  tail(12);
  tail(6);
  tail(0);
}

}  // namespace heavywater
