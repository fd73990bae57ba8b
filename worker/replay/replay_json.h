// What heavywater-replay is asked, as JSON:
//
//   {"trace": PATH,
//    "policies": [{"policy": "h2o", ...}]  fields of PolicyOptions
//    "num_threads", "page_tokens"}
//
// and its answer: {"trace": {the header's fields}, "rows": [{"policy", "scope",
// "recall", "queries", "mass_kept", "error", "agreement", "resident_tokens",
// "device_bytes", "bytes_ratio"}]} (replay.h).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"

namespace heavywater {

// INVALID_ARGUMENT naming the field; what ReadTrace() and Replay() say.
absl::StatusOr<nlohmann::json> AnswerReplayRequest(const std::string& text);

}  // namespace heavywater
