// A further turn: a request that names a sequence and has its text so far, and more.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "heavywater/v1/generation.pb.h"
#include "heavywater/v1/sequence.pb.h"
#include "worker/server/generation_request.h"

namespace heavywater {

// INVALID_ARGUMENT naming the field: only token ids say where a text goes on.
absl::Status CheckTurn(const v1::GenerateRequest& proto);

// The request as one of `known`: its prompt is that of the sequence, what follows is
// appended. INVALID_ARGUMENT: it is not longer than the prompt; FAILED_PRECONDITION: it
// has another policy; else as ParseGenerateRequest().
absl::StatusOr<GenerationRequest> ParseTurn(const v1::GenerateRequest& proto,
                                            const v1::Sequence& known,
                                            const GenerationLimits& limits);

}  // namespace heavywater
