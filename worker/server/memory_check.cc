#include "worker/server/memory_check.h"

#include "absl/strings/str_cat.h"
#include "cache_service/base/shortage.h"
#include "cache_service/base/status.h"

namespace heavywater {

MemoryCheck::MemoryCheck(const RankCache& cache)
    : cache_(cache),
      limit_bytes_(cache.memory().limit_bytes()),
      standing_bytes_(cache.memory().reserved_bytes()) {}

bool MemoryCheck::Fits(const SequenceOptions& options, int64_t prompt_tokens) const {
  SequenceOptions shorter = options;
  shorter.prompt_tokens = prompt_tokens;
  shorter.max_tokens = prompt_tokens + options.max_tokens - options.prompt_tokens;
  const auto bytes = cache_.DeviceBytesNeeded(shorter);
  return bytes.ok() && *bytes <= limit_bytes_ - standing_bytes_;
}

absl::Status MemoryCheck::Check(const SequenceOptions& options) const {
  HW_ASSIGN_OR_RETURN(const int64_t need, cache_.DeviceBytesNeeded(options));
  if (limit_bytes_ == 0 || need <= limit_bytes_ - standing_bytes_) return absl::OkStatus();
  int64_t fits = 0;
  int64_t too_long = options.prompt_tokens;
  while (fits + 1 < too_long) {
    const int64_t middle = fits + (too_long - fits) / 2;
    (Fits(options, middle) ? fits : too_long) = middle;
  }
  // By itself already too large: waiting does not help.
  return ExhaustedError(
      absl::StrCat("prompt of ", options.prompt_tokens, " tokens and ",
                   options.max_tokens - options.prompt_tokens, " after it need ", need,
                   " bytes of device memory on each rank; the limit, device_memory_bytes, is ",
                   limit_bytes_, " of which ", standing_bytes_,
                   " are workspace; the longest prompt that fits has ", fits, " tokens"),
      {.subject = "device_memory_bytes",
       .need = need,
       .available = limit_bytes_ - standing_bytes_,
       .limit = limit_bytes_});
}

}  // namespace heavywater
