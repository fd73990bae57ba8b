// What the `tier` benchmark compares with: a Redis over TCP, the disk tier, RocksDB as it
// is. Each is null where this build or machine lacks it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "cache_service/tier/lower_tier.h"

namespace heavywater {

// A Redis of its own, on this machine, ended with it.
std::unique_ptr<LowerTier> StartBenchRedis();

// In a folder of its own, which goes with it.
std::unique_ptr<LowerTier> OpenBenchDisk(int64_t total_bytes);

// Values by key, without header or checksum of the project's, with the same settings.
class BareRocksDb {
 public:
  static std::unique_ptr<BareRocksDb> Open(int64_t total_bytes);
  virtual ~BareRocksDb() = default;
  virtual absl::Status Put(const std::string& key, std::span<const std::byte> bytes) = 0;
  virtual absl::Status Get(const std::string& key, std::span<std::byte> bytes) = 0;
};

}  // namespace heavywater
