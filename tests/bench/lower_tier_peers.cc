#include "tests/bench/lower_tier_peers.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#ifdef HEAVYWATER_DISK_TIER
#include <rocksdb/db.h>

#include "cache_service/tier/disk_tier.h"
#include "cache_service/tier/disk_tier_options.h"
#endif
#ifdef HEAVYWATER_REMOTE_TIER
#include "cache_service/tier/remote_tier.h"
#include "tests/cache_service/tier/redis_server.h"
#endif

namespace heavywater {
namespace {

// Forwards to a tier and owns what must go after it.
template <typename Owned>
class TierWith final : public LowerTier {
 public:
  TierWith(Owned owned, std::unique_ptr<LowerTier> tier)
      : owned_(std::move(owned)), tier_(std::move(tier)) {}
  const char* name() const override { return tier_->name(); }
  std::vector<absl::Status> Put(std::span<const PageCopy> pages) override {
    return tier_->Put(pages);
  }
  absl::StatusOr<uint32_t> Get(const PageKey& key, std::span<std::byte> bytes) override {
    return tier_->Get(key, bytes);
  }
  absl::Status Erase(std::span<const PageKey> keys) override { return tier_->Erase(keys); }
  absl::Status EraseSequence(SequenceId id) override { return tier_->EraseSequence(id); }
  absl::Status Restore(std::span<const StoredPage> pages) override { return tier_->Restore(pages); }
  LowerTierStats Stats() const override { return tier_->Stats(); }

 private:
  const Owned owned_;
  const std::unique_ptr<LowerTier> tier_;
};

#ifdef HEAVYWATER_DISK_TIER
struct Folder {
  explicit Folder(const char* what)
      : path((std::filesystem::temp_directory_path() /
              absl::StrCat("heavywater-bench-", what, "-", getpid()))
                 .string()) {
    std::filesystem::remove_all(path);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  const std::string path;
};

class Bare final : public BareRocksDb {
 public:
  Bare(std::unique_ptr<Folder> folder, rocksdb::DB* db) : folder_(std::move(folder)), db_(db) {}

  absl::Status Put(const std::string& key, std::span<const std::byte> bytes) override {
    rocksdb::WriteOptions options;
    options.disableWAL = true;
    const rocksdb::Slice value(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const rocksdb::Status status = db_->Put(options, key, value);
    return status.ok() ? absl::OkStatus() : absl::InternalError(status.ToString());
  }
  absl::Status Get(const std::string& key, std::span<std::byte> bytes) override {
    rocksdb::PinnableSlice value;
    const rocksdb::Status status = db_->Get({}, db_->DefaultColumnFamily(), key, &value);
    if (!status.ok() || value.size() != bytes.size()) {
      return absl::InternalError(absl::StrCat("RocksDB: ", status.ToString()));
    }
    std::memcpy(bytes.data(), value.data(), value.size());
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<Folder> folder_;
  const std::unique_ptr<rocksdb::DB> db_;
};
#endif

}  // namespace

std::unique_ptr<LowerTier> StartBenchRedis() {
#ifdef HEAVYWATER_REMOTE_TIER
  std::string reason;
  std::unique_ptr<RedisServer> server = RedisServer::Start(&reason);
  if (server == nullptr) return nullptr;
  auto tier = OpenRemoteTier({.address = server->address(),
                              .store_id = "bench",
                              .total_bytes = int64_t{1} << 30,
                              .timeout = absl::Seconds(10)},
                             Clock::Real());
  if (!tier.ok()) return nullptr;
  return std::make_unique<TierWith<std::unique_ptr<RedisServer>>>(std::move(server),
                                                                  *std::move(tier));
#else
  return nullptr;
#endif
}

std::unique_ptr<LowerTier> OpenBenchDisk(int64_t total_bytes) {
#ifdef HEAVYWATER_DISK_TIER
  auto folder = std::make_unique<Folder>("disk");
  auto tier = OpenDiskTier({.path = folder->path, .total_bytes = total_bytes});
  if (!tier.ok()) return nullptr;
  return std::make_unique<TierWith<std::unique_ptr<Folder>>>(std::move(folder), *std::move(tier));
#else
  return nullptr;
#endif
}

std::unique_ptr<BareRocksDb> BareRocksDb::Open(int64_t total_bytes) {
#ifdef HEAVYWATER_DISK_TIER
  auto folder = std::make_unique<Folder>("rocksdb");
  rocksdb::DB* db = nullptr;
  if (!rocksdb::DB::Open(DiskTierDatabaseOptions(total_bytes), folder->path, &db).ok()) {
    return nullptr;
  }
  return std::make_unique<Bare>(std::move(folder), db);
#else
  return nullptr;
#endif
}

}  // namespace heavywater
