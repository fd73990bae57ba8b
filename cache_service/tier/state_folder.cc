#include "cache_service/tier/state_folder.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

namespace fs = std::filesystem;

// Says whose folder it is, and of which version, before anything else is read.
constexpr char kFormatFile[] = "HEAVYWATER_STATE";
constexpr char kDatabase[] = "db";
// Sorts after every record's key; no record begins with it.
constexpr char kChangesKey[] = "~changes";

rocksdb::Options DatabaseOptions() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;
  // A record at the end that is cut off was never answered for; one in the middle that is
  // damaged must not quietly take the later ones along.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  options.write_buffer_size = 16 << 20;
  options.max_write_buffer_number = 2;
  options.max_total_wal_size = 128 << 20;
  // Snapshots are large, and replaced again and again.
  options.enable_blob_files = true;
  options.min_blob_size = 64 << 10;
  options.enable_blob_garbage_collection = true;
  options.max_open_files = 128;
  options.keep_log_file_num = 2;
  options.max_log_file_size = 1 << 20;
  return options;
}

absl::Status FromRocksDb(const std::string& path, const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = absl::StrCat("state_dir \"", path, "\": ", status.ToString());
  if (status.IsCorruption() || status.IsInvalidArgument() || status.IsNotSupported()) {
    return absl::DataLossError(text);
  }
  return absl::UnavailableError(text);
}

std::string FormatText() { return absl::StrCat("heavywater state ", kStateFormatVersion, "\n"); }

absl::Status CheckFormat(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat("state_dir \"", path, "\": ", error.message()));
  }
  const fs::path file = fs::path(path) / kFormatFile;
  if (fs::exists(file, error)) {
    std::ifstream in(file);
    std::ostringstream text;
    text << in.rdbuf();
    if (text.str() == FormatText()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("state_dir \"", path, "\" says \"", text.str(),
                                            "\", this service writes \"", FormatText(), "\""));
  }
  if (!fs::is_empty(path, error)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "state_dir \"", path, "\" holds files that are not a state (no ", kFormatFile, ")"));
  }
  std::ofstream out(file);
  out << FormatText();
  out.close();
  if (out) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("state_dir \"", path, "\": cannot be written"));
}

std::string DatabasePath(const std::string& path) { return (fs::path(path) / kDatabase).string(); }

}  // namespace

StateFolder::StateFolder(std::unique_ptr<rocksdb::DB> db, uint64_t num_changes)
    : db_(std::move(db)), num_changes_(num_changes) {}

StateFolder::~StateFolder() = default;

absl::StatusOr<std::unique_ptr<StateFolder>> StateFolder::Open(const std::string& path) {
  HW_RETURN_IF_ERROR(CheckFormat(path));
  rocksdb::DB* opened = nullptr;
  HW_RETURN_IF_ERROR(
      FromRocksDb(path, rocksdb::DB::Open(DatabaseOptions(), DatabasePath(path), &opened)));
  std::unique_ptr<rocksdb::DB> db(opened);
  std::string text;
  uint64_t changes = 0;
  const rocksdb::Status found = db->Get({}, kChangesKey, &text);
  if (!found.IsNotFound()) {
    HW_RETURN_IF_ERROR(FromRocksDb(path, found));
    if (!absl::SimpleAtoi(text, &changes)) {
      return absl::DataLossError(
          absl::StrCat("state_dir \"", path, "\": number of changes is \"", text, "\""));
    }
  }
  return std::unique_ptr<StateFolder>(new StateFolder(std::move(db), changes));
}

absl::Status StateFolder::Clear(const std::string& path) {
  const fs::path file = fs::path(path) / kFormatFile;
  std::error_code error;
  if (!fs::exists(file, error)) return absl::OkStatus();
  fs::remove_all(DatabasePath(path), error);
  // Last: with it the folder is nobody's.
  if (!error) fs::remove(file, error);
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("state_dir \"", path, "\": ", error.message()));
}

void StateFolder::CountIn(std::atomic<uint64_t>& changes) {
  MutexLock lock(&mutex_);
  count_ = &changes;
  count_->store(num_changes_);
}

void StateFolder::Apply(const StateBatch& batch) {
  MutexLock lock(&mutex_);
  if (!broken_.ok()) return;
  rocksdb::WriteBatch writes;
  rocksdb::Status status;
  const auto add = [&](rocksdb::Status added) {
    if (status.ok()) status = std::move(added);
  };
  for (const StateBatch::Change& change : batch.changes()) {
    switch (change.kind) {
      case StateBatch::Kind::kPut:
        add(writes.Put(change.key, change.value));
        break;
      case StateBatch::Kind::kDelete:
        add(writes.Delete(change.key));
        break;
      case StateBatch::Kind::kDeletePrefix:
        // No key goes on with bytes of 0xff only: ids count up from the start time.
        add(writes.DeleteRange(change.key, change.key + std::string(17, '\xff')));
    }
  }
  add(writes.Put(kChangesKey, absl::StrCat(num_changes_ + 1)));
  // Written to the log, not synced: it survives this process.
  if (status.ok()) status = db_->Write({}, &writes);
  if (!status.ok()) broken_ = absl::UnavailableError(status.ToString());
  if (status.ok()) ++num_changes_;
  if (count_ != nullptr) count_->store(status.ok() ? num_changes_.load() : kStateBroken);
}

absl::Status StateFolder::ForEach(const std::string& prefix, const Visit& visit) const {
  const std::unique_ptr<rocksdb::Iterator> found(db_->NewIterator({}));
  for (found->Seek(prefix); found->Valid() && found->key().starts_with(prefix); found->Next()) {
    HW_RETURN_IF_ERROR(visit({found->key().data(), found->key().size()},
                             {found->value().data(), found->value().size()}));
  }
  if (found->status().ok()) return absl::OkStatus();
  return absl::DataLossError(found->status().ToString());
}

absl::Status StateFolder::broken() const {
  MutexLock lock(&mutex_);
  return broken_;
}

}  // namespace heavywater
