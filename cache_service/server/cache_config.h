// The cache service's configuration: defaults and checks.
#pragma once

#include "absl/status/status.h"
#include "heavywater/v1/config.pb.h"

namespace heavywater {

// What the comments of CacheConfig give in brackets.
v1::CacheConfig DefaultCacheConfig();

// INVALID_ARGUMENT naming the field, got and wanted.
absl::Status ValidateCacheConfig(const v1::CacheConfig& config);

}  // namespace heavywater
