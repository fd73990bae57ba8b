// An absl::Status becomes a Python exception, heavywater.errors.HeavywaterError.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heavywater {

// Throws when `status` is an error. With the interpreter's lock held.
void RaiseIfError(const absl::Status& status);

template <typename T>
T ValueOrRaise(absl::StatusOr<T> value) {
  RaiseIfError(value.status());
  return *std::move(value);
}

}  // namespace heavywater
