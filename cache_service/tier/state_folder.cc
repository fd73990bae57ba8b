#include "cache_service/tier/state_folder.h"

#include <fcntl.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

namespace fs = std::filesystem;

// Says whose folder it is, and of which version, before anything else is read.
constexpr char kFormatFile[] = "HEAVYWATER_STATE";
constexpr char kNewFormatFile[] = "HEAVYWATER_STATE.new";  // on its way to that name
// One process has the folder: taken before anything there is read, never removed.
constexpr char kLockFile[] = "HEAVYWATER_LOCK";
constexpr char kDatabase[] = "db";
constexpr char kRemoved[] = "db.removed";
// Sorts after every record's key; no record begins with it.
constexpr char kChangesKey[] = "~changes";

// RocksDB may end the process when it cannot write its own log: on a disk that is full the
// service is to go on, without a state.
class NoInfoLog final : public rocksdb::Logger {
 public:
  using rocksdb::Logger::Logv;
  void Logv(const char*, va_list) override {}
};

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
  options.info_log = std::make_shared<NoInfoLog>();
  options.max_bgerror_resume_count = 0;  // what is broken once is not used again
  return options;
}

absl::Status FromRocksDb(const std::string& path, const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = absl::StrCat("state_dir \"", path, "\": ", status.ToString());
  // A file that is missing is damage, too: it does not come back.
  if (status.IsCorruption() || status.IsInvalidArgument() || status.IsNotSupported() ||
      status.IsPathNotFound()) {
    return absl::DataLossError(text);
  }
  return absl::UnavailableError(text);
}

std::string FormatText(int version = kStateFormatVersion) {
  return absl::StrCat("heavywater state ", version, "\n");
}

absl::Status Unusable(const std::string& path, const std::string& why) {
  return absl::UnavailableError(absl::StrCat("state_dir \"", path, "\": ", why));
}

bool IsSomebodyElses(const std::string& path, std::error_code& error) {
  if (fs::exists(fs::path(path) / kFormatFile, error) || error) return false;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    const fs::path name = entry.path().filename();
    if (name != kLockFile && name != kNewFormatFile) return true;
  }
  return false;
}

// Makes the folder. FAILED_PRECONDITION: it has an owner of another kind.
absl::Status CheckOwner(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  const bool foreign = !error && IsSomebodyElses(path, error);
  if (error) return Unusable(path, error.message());
  if (!foreign) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "state_dir \"", path, "\" holds files that are not a state (no ", kFormatFile, ")"));
}

// What cannot be read may still be a good state.
absl::StatusOr<std::string> ReadFormat(const std::string& path) {
  char text[64];
  std::ifstream in(fs::path(path) / kFormatFile);
  if (!in.is_open()) return Unusable(path, absl::StrCat(kFormatFile, " cannot be read"));
  in.read(text, sizeof(text));
  if (in.bad()) return Unusable(path, absl::StrCat(kFormatFile, " cannot be read"));
  return std::string(text, in.gcount());
}

// In one step: half a file would be another version.
absl::Status WriteFormat(const std::string& path) {
  const fs::path written = fs::path(path) / kNewFormatFile;
  std::ofstream out(written);
  out << FormatText();
  out.close();
  if (!out) return Unusable(path, "cannot be written");
  std::error_code error;
  fs::rename(written, fs::path(path) / kFormatFile, error);
  return error ? Unusable(path, error.message()) : absl::OkStatus();
}

// Writes what is missing; a folder of an earlier version that is read becomes one of this one,
// which the earlier service does not read.
absl::Status CheckFormat(const std::string& path) {
  std::error_code error;
  if (fs::exists(fs::path(path) / kFormatFile, error)) {
    HW_ASSIGN_OR_RETURN(const std::string text, ReadFormat(path));
    if (text == FormatText()) return absl::OkStatus();
    for (int version = kOldestStateFormatVersion; version < kStateFormatVersion; ++version) {
      if (text == FormatText(version)) return WriteFormat(path);
    }
    return absl::DataLossError(absl::StrCat("state_dir \"", path, "\" says \"", text,
                                            "\", this service writes \"", FormatText(), "\""));
  }
  return error ? Unusable(path, error.message()) : WriteFormat(path);
}

std::string DatabasePath(const std::string& path) { return (fs::path(path) / kDatabase).string(); }

// In one step, as far as a later start can tell: half a database could pass for a whole one.
absl::Status Remove(const std::string& path) {
  const fs::path removed = fs::path(path) / kRemoved;
  std::error_code error;
  fs::remove_all(removed, error);
  if (!error && fs::exists(DatabasePath(path), error)) {
    fs::rename(DatabasePath(path), removed, error);
    if (!error) fs::remove_all(removed, error);
  }
  // Last: without it the folder would be somebody else's.
  if (!error) fs::remove(fs::path(path) / kFormatFile, error);
  return error ? Unusable(path, error.message()) : absl::OkStatus();
}

}  // namespace

StateFolder::StateFolder(Lock folder_lock, std::unique_ptr<rocksdb::DB> db, uint64_t num_changes)
    : folder_lock_(std::move(folder_lock)), db_(std::move(db)), num_changes_(num_changes) {}

StateFolder::~StateFolder() {
  // RocksDB may end the process when it closes a log that it could not write: one that is
  // broken stays open until the process has ended.
  if (broken().ok()) return;
  static auto* const abandoned = new std::vector<rocksdb::DB*>();
  abandoned->push_back(db_.release());
}

StateFolder::Lock::~Lock() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<StateFolder::Lock> StateFolder::Lock::Take(const std::string& path) {
  HW_RETURN_IF_ERROR(CheckOwner(path));
  const fs::path file = fs::path(path) / kLockFile;
  Lock lock(open(file.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
  if (lock.fd_ < 0) return Unusable(path, absl::StrCat(kLockFile, ": ", std::strerror(errno)));
  if (flock(lock.fd_, LOCK_EX | LOCK_NB) == 0) return lock;
  if (errno == EWOULDBLOCK) return Unusable(path, "another process that runs has it open");
  return Unusable(path, absl::StrCat(kLockFile, ": ", std::strerror(errno)));
}

absl::StatusOr<std::unique_ptr<StateFolder>> StateFolder::Open(const std::string& path) {
  HW_ASSIGN_OR_RETURN(Lock folder_lock, Lock::Take(path));
  return OpenLocked(path, std::move(folder_lock));
}

absl::StatusOr<std::unique_ptr<StateFolder>> StateFolder::OpenAnew(const std::string& path) {
  HW_ASSIGN_OR_RETURN(Lock folder_lock, Lock::Take(path));
  HW_RETURN_IF_ERROR(Remove(path));
  return OpenLocked(path, std::move(folder_lock));
}

absl::StatusOr<std::unique_ptr<StateFolder>> StateFolder::OpenLocked(const std::string& path,
                                                                     Lock folder_lock) {
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
  return std::unique_ptr<StateFolder>(
      new StateFolder(std::move(folder_lock), std::move(db), changes));
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
  if (!broken_.ok() && tell_) tell_(broken_);
}

absl::Status StateFolder::Sync() {
  HW_RETURN_IF_ERROR(broken());
  const rocksdb::Status synced = db_->FlushWAL(/*sync=*/true);
  return synced.ok() ? absl::OkStatus() : absl::UnavailableError(synced.ToString());
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

void StateFolder::WhenBroken(std::function<void(const absl::Status&)> tell) {
  MutexLock lock(&mutex_);
  tell_ = std::move(tell);
}

absl::Status StateFolder::broken() const {
  MutexLock lock(&mutex_);
  return broken_;
}

}  // namespace heavywater
