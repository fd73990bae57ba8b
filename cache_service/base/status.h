// Helpers over absl::Status. Debian's Abseil has no status macros.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define HW_STATUS_CONCAT_INNER(a, b) a##b
#define HW_STATUS_CONCAT(a, b) HW_STATUS_CONCAT_INNER(a, b)

// Returns from the enclosing function when `expr` is an error.
#define HW_RETURN_IF_ERROR(expr)                                               \
  do {                                                                         \
    if (absl::Status hw_status_ = (expr); !hw_status_.ok()) return hw_status_; \
  } while (false)

// HW_ASSIGN_OR_RETURN(auto page, store.Read(key)): `lhs` gets the value, or
// the enclosing function returns the error.
#define HW_ASSIGN_OR_RETURN(lhs, expr) \
  HW_ASSIGN_OR_RETURN_INNER(HW_STATUS_CONCAT(hw_statusor_, __LINE__), lhs, expr)
#define HW_ASSIGN_OR_RETURN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                              \
  if (!tmp.ok()) return std::move(tmp).status();  \
  lhs = *std::move(tmp)
