// NCCL's results as Status.
#pragma once

#include <nccl.h>

#include "absl/status/status.h"

namespace heavywater {

// OK for ncclSuccess. UNAVAILABLE for what a peer or the network causes, else
// INTERNAL; names the expression, NCCL's word for the result, and the last
// detail NCCL logged.
absl::Status NcclStatus(ncclResult_t result, const char* expression);

}  // namespace heavywater

// The status of a call of NCCL's, naming it.
#define HW_NCCL_STATUS(expression) ::heavywater::NcclStatus((expression), #expression)
