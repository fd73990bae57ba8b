#include "worker/model/streaming_decoder.h"

#include <string_view>

#include "cache_service/base/status.h"
#include "worker/model/tokenizer.h"
#include "worker/model/utf8.h"

namespace heavywater {

absl::StatusOr<std::string> StreamingDecoder::Add(int32_t token) {
  HW_ASSIGN_OR_RETURN(const std::string_view bytes, tokenizer_.TokenBytes(token));
  held_ += bytes;
  std::string text;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Utf8Step step = DecodeUtf8(rest);
    if (step.kind == Utf8Step::kIncomplete) break;
    const auto size = static_cast<size_t>(step.bytes);
    text += step.kind == Utf8Step::kValid ? rest.substr(0, size) : kReplacementCharacter;
    rest.remove_prefix(size);
  }
  held_ = std::string(rest);
  return text;
}

std::string StreamingDecoder::Finish() {
  const bool holds = !held_.empty();
  held_.clear();
  return std::string(holds ? kReplacementCharacter : std::string_view());
}

}  // namespace heavywater
