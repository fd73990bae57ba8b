// The disk tier: sealed pages in a RocksDB of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cache_service/tier/lower_tier.h"

namespace heavywater {

struct DiskTierOptions {
  std::string path;         // a folder for this tier alone; made where it is missing
  int64_t total_bytes = 0;  // of stored pages; RocksDB's files take more for a while
  // Pages outlive the process, for a Restore() of the next: each is written twice then.
  bool keeps = false;
  bool restores = false;  // what an earlier process has kept is there for Restore()
};

// Unless it is to be restored, erases what an earlier process has left there. FAILED_PRECONDITION
// naming both when another format version lies there, or a database that is not this tier's: then
// nothing is touched. UNAVAILABLE: the folder cannot be used (another process has it open, say).
absl::StatusOr<std::unique_ptr<LowerTier>> OpenDiskTier(const DiskTierOptions& options);

}  // namespace heavywater
