#include "cache_service/tier/disk_tier.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/disk_tier_options.h"
#include "cache_service/tier/page_book.h"
#include "cache_service/tier/stored_page.h"

namespace heavywater {
namespace {

constexpr char kName[] = "disk";
// Shorter than every page's key, so that it is none; sorts after them all, since ids are
// far below 2^62.
constexpr char kVersionKey[] = "heavywater";
constexpr size_t kKeysPerBatch = 1024;
// Beside the page's bytes: key, header, and what RocksDB writes around them.
constexpr size_t kRecordBytes = kStoredKeyBytes + kStoredHeaderBytes + 32;

// Where pages do not outlive the process the write-ahead log would only write each of
// them twice. It is not synced: pages survive the process, not the machine.
rocksdb::WriteOptions WriteOptionsOf(const DiskTierOptions& options) {
  rocksdb::WriteOptions written;
  written.disableWAL = !options.keeps;
  return written;
}

absl::Status FromRocksDb(const rocksdb::Status& status) {
  const std::string text = absl::StrCat("disk tier: ", status.ToString());
  if (status.ok()) return absl::OkStatus();
  if (status.IsNotFound()) return absl::NotFoundError(text);
  if (status.IsCorruption() || status.IsPathNotFound()) return absl::DataLossError(text);
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(text);
  return absl::UnavailableError(text);
}

// A RocksDB whose file system is full can end the process: Debian builds it with assertions,
// and one of them does not expect a log that cannot be written. So the tier leaves a margin,
// beyond what memory not yet written will take.
absl::Status CheckFreeSpace(const DiskTierOptions& options, int64_t bytes) {
  const rocksdb::Options database = DiskTierDatabaseOptions(options.total_bytes);
  const int64_t margin =
      static_cast<int64_t>(database.write_buffer_size) * (database.max_write_buffer_number + 1) +
      static_cast<int64_t>(database.max_log_file_size) * 2;
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(options.path, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("disk_path \"", options.path, "\": ", error.message()));
  }
  const auto available = static_cast<int64_t>(
      std::min<uintmax_t>(space.available, std::numeric_limits<int64_t>::max()));
  if (available >= bytes + margin) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("disk tier: the file system of disk_path \"", options.path, "\" has ", available,
                   " bytes left, want ", bytes, " for the pages and ", margin, " to spare"));
}

rocksdb::Slice SliceOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string VersionText() { return absl::StrCat(kStoredPageVersion); }

absl::StatusOr<std::unique_ptr<rocksdb::DB>> OpenDatabase(const DiskTierOptions& options) {
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status =
      rocksdb::DB::Open(DiskTierDatabaseOptions(options.total_bytes), options.path, &db);
  if (!status.ok()) {
    return absl::UnavailableError(
        absl::StrCat("disk_path \"", options.path, "\": ", status.ToString()));
  }
  return std::unique_ptr<rocksdb::DB>(db);
}

// Whose database it is. A new one is nobody's: NOT_FOUND.
absl::Status CheckVersion(rocksdb::DB& db, const std::string& path) {
  std::string version;
  const rocksdb::Status status = db.Get({}, kVersionKey, &version);
  if (status.ok() && version == VersionText()) return absl::OkStatus();
  if (status.ok()) {
    return absl::FailedPreconditionError(absl::StrCat("disk_path \"", path,
                                                      "\" has format version ", version,
                                                      ", this service writes ", VersionText()));
  }
  if (!status.IsNotFound()) return FromRocksDb(status);
  const std::unique_ptr<rocksdb::Iterator> first(db.NewIterator({}));
  first->SeekToFirst();
  if (!first->Valid()) return absl::NotFoundError("empty");
  return absl::FailedPreconditionError(absl::StrCat(
      "disk_path \"", path, "\" holds a RocksDB that is not a disk tier (no format version)"));
}

class DiskTier final : public LowerTier {
 public:
  DiskTier(std::unique_ptr<rocksdb::DB> db, const DiskTierOptions& options)
      : db_(std::move(db)),
        options_(options),
        write_options_(WriteOptionsOf(options)),
        book_(kName, options.total_bytes) {}

  const char* name() const override { return kName; }

  std::vector<absl::Status> Put(std::span<const PageCopy> pages) override {
    std::vector<absl::Status> statuses;
    std::vector<PageKey> added;
    size_t batch_bytes = 0;
    for (const PageCopy& page : pages) batch_bytes += page.bytes.size() + kRecordBytes;
    if (const absl::Status space = CheckFreeSpace(options_, static_cast<int64_t>(batch_bytes));
        !space.ok()) {
      return std::vector<absl::Status>(pages.size(), space);
    }
    rocksdb::WriteBatch batch(batch_bytes);  // grown, it would be copied again and again
    for (const PageCopy& page : pages) {
      const auto room = book_.Add(page.key, static_cast<int64_t>(page.bytes.size()));
      statuses.push_back(room.status());
      if (!room.ok()) continue;
      if (*room) added.push_back(page.key);
      statuses.back() = FromRocksDb(AddToBatch(page, batch));
    }
    const absl::Status written = Write(batch);
    if (written.ok()) return statuses;
    for (const PageKey& key : added) book_.Remove(key);
    for (absl::Status& status : statuses) {
      if (status.ok()) status = written;
    }
    return statuses;
  }

  absl::StatusOr<uint32_t> Get(const PageKey& key, std::span<std::byte> bytes) override {
    rocksdb::PinnableSlice value;
    const std::string stored_key = StoredKey(key);
    const rocksdb::Status status = db_->Get({}, db_->DefaultColumnFamily(), stored_key, &value);
    if (status.IsNotFound()) {
      return absl::NotFoundError(absl::StrCat(Describe(key), " is not in the disk tier"));
    }
    HW_RETURN_IF_ERROR(FromRocksDb(status));
    return TakeStoredPage(key, std::as_bytes(std::span(value.data(), value.size())), bytes);
  }

  absl::Status Erase(std::span<const PageKey> keys) override {
    rocksdb::WriteBatch batch;
    for (const PageKey& key : keys) {
      HW_RETURN_IF_ERROR(FromRocksDb(batch.Delete(StoredKey(key))));
    }
    HW_RETURN_IF_ERROR(Write(batch));
    for (const PageKey& key : keys) book_.Remove(key);
    return absl::OkStatus();
  }

  absl::Status EraseSequence(SequenceId sequence) override {
    while (true) {
      const std::vector<PageKey> keys = book_.KeysOf(sequence, kKeysPerBatch);
      if (keys.empty()) return absl::OkStatus();
      HW_RETURN_IF_ERROR(Erase(keys));
    }
  }

  // A page that is not there after all is a miss when it is asked for. Sequences that
  // nobody has any more are erased by ranges between the others: reading their keys
  // would read their pages. Where the medium refuses that, the next start does it.
  absl::Status Restore(std::span<const StoredPage> pages) override {
    HW_ASSIGN_OR_RETURN(const std::vector<PageKey> left_out, book_.Restore(pages));
    EraseLeftOver(pages, left_out).IgnoreError();
    return absl::OkStatus();
  }

  LowerTierStats Stats() const override { return book_.Stats(); }

 private:
  absl::Status EraseLeftOver(std::span<const StoredPage> pages, std::span<const PageKey> left_out) {
    std::set<SequenceId> kept;
    for (const StoredPage& page : pages) kept.insert(page.key.sequence);
    rocksdb::WriteBatch left_over;
    for (const PageKey& key : left_out) {
      HW_RETURN_IF_ERROR(FromRocksDb(left_over.Delete(StoredKey(key))));
    }
    std::string begin = StoredKey({.sequence = 0});
    for (const SequenceId sequence : kept) {
      const std::string end = StoredKey({.sequence = sequence});
      HW_RETURN_IF_ERROR(FromRocksDb(left_over.DeleteRange(begin, end)));
      begin = StoredKey({.sequence = sequence + 1});
    }
    HW_RETURN_IF_ERROR(FromRocksDb(left_over.DeleteRange(begin, kVersionKey)));
    return Write(left_over);
  }

  static rocksdb::Status AddToBatch(const PageCopy& page, rocksdb::WriteBatch& batch) {
    const std::string key = StoredKey(page.key);
    const StoredHeader header = MakeStoredHeader(page);
    const rocksdb::Slice key_slice = key;
    const std::array<rocksdb::Slice, 2> value = {SliceOf(header), SliceOf(page.bytes)};
    return batch.Put(rocksdb::SliceParts(&key_slice, 1), rocksdb::SliceParts(value.data(), 2));
  }

  // A database whose disk is full refuses writes until RocksDB finds room again (it
  // looks every few seconds); what it holds stays readable.
  absl::Status Write(rocksdb::WriteBatch& batch) {
    if (batch.Count() == 0) return absl::OkStatus();
    return FromRocksDb(db_->Write(write_options_, &batch));
  }

  const std::unique_ptr<rocksdb::DB> db_;
  const DiskTierOptions options_;
  const rocksdb::WriteOptions write_options_;
  PageBook book_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LowerTier>> OpenDiskTier(const DiskTierOptions& options) {
  std::error_code error;
  std::filesystem::create_directories(options.path, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("disk_path \"", options.path, "\": ", error.message()));
  }
  HW_ASSIGN_OR_RETURN(std::unique_ptr<rocksdb::DB> db, OpenDatabase(options));
  const absl::Status version = CheckVersion(*db, options.path);
  if (version.ok() && !options.restores) {
    db.reset();
    HW_RETURN_IF_ERROR(FromRocksDb(
        rocksdb::DestroyDB(options.path, DiskTierDatabaseOptions(options.total_bytes))));
    HW_ASSIGN_OR_RETURN(db, OpenDatabase(options));
  } else if (!version.ok() && !absl::IsNotFound(version)) {
    return version;
  }
  HW_RETURN_IF_ERROR(FromRocksDb(db->Put({}, kVersionKey, VersionText())));
  return std::make_unique<DiskTier>(std::move(db), options);
}

}  // namespace heavywater
