// A worker without a model of its own (model "none"): what the configuration says of
// the model that engines run.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "heavywater/v1/common.pb.h"
#include "heavywater/v1/config.pb.h"
#include "worker/cache/kv_layout.h"

namespace heavywater {

inline constexpr char kNoModel[] = "none";

// Whether engines bring Q, K and V.
inline bool ServesEngines(const v1::WorkerConfig& config) { return config.model() == kNoModel; }

// The fields engine_*: set where engines are served, absent elsewhere.
// INVALID_ARGUMENT naming the field.
absl::Status CheckEngineConfig(const v1::WorkerConfig& config);

// This rank's heads. INVALID_ARGUMENT where ranks cannot share them.
absl::StatusOr<KvShape> EngineShape(const v1::WorkerConfig& config);
v1::Fingerprint EngineFingerprint(const v1::WorkerConfig& config, const KvShape& shape);

// Rows that a step may have: prompt_chunk_tokens, or as many as fit a message.
// At least 1, or INVALID_ARGUMENT.
absl::StatusOr<int> EngineStepTokens(const v1::WorkerConfig& config, const KvShape& shape);

}  // namespace heavywater
