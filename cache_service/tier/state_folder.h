// Where the state is kept: a folder with a RocksDB of small records.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/state_store.h"

namespace rocksdb {
class DB;
}

namespace heavywater {

// Thread safe.
class StateFolder final : public StateStore {
 public:
  // What lies there, or an empty state. DATA_LOSS: there is one, but of another version
  // or damaged: OpenAnew(). FAILED_PRECONDITION: the folder holds something else, which is
  // not touched. UNAVAILABLE: it cannot be used (another process has it open, say). It is
  // locked before any of that is looked at, until this ends.
  static absl::StatusOr<std::unique_ptr<StateFolder>> Open(const std::string& path);
  // Removes what Open() of an earlier process has made there first, under the same lock.
  static absl::StatusOr<std::unique_ptr<StateFolder>> OpenAnew(const std::string& path);

  ~StateFolder() override;

  // Changes since the folder was made.
  uint64_t num_changes() const { return num_changes_; }
  // `changes` lies where the state's memory lies, and survives as that does: it says from
  // now on how many changes there were, so that a folder which lacks some is told from
  // one that is whole. Outlives this.
  void CountIn(std::atomic<uint64_t>& changes);
  // Whether a state of so many changes (as CountIn() left them) is what lies here: one
  // more may have been on its way.
  bool Matches(uint64_t changes) const {
    return num_changes_ == changes || num_changes_ == changes + 1;
  }

  void Apply(const StateBatch& batch) override;
  absl::Status Sync() override;  // UNAVAILABLE: the medium refuses
  absl::Status ForEach(const std::string& prefix, const Visit& visit) const override;

  absl::Status broken() const override;
  // Called once, when that begins, by the thread that made the change; it must not call this.
  void WhenBroken(std::function<void(const absl::Status&)> tell);

 private:
  // Of the process, for as long as it lives.
  class Lock {
   public:
    explicit Lock(int fd) : fd_(fd) {}
    Lock(Lock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Lock& operator=(Lock&&) = delete;
    ~Lock();
    static absl::StatusOr<Lock> Take(const std::string& path);

   private:
    int fd_;
  };

  StateFolder(Lock folder_lock, std::unique_ptr<rocksdb::DB> db, uint64_t num_changes);
  static absl::StatusOr<std::unique_ptr<StateFolder>> OpenLocked(const std::string& path,
                                                                 Lock folder_lock);

  const Lock folder_lock_;  // goes last
  std::unique_ptr<rocksdb::DB> db_;
  mutable Mutex mutex_;  // changes are counted one by one
  std::atomic<uint64_t> num_changes_;
  std::atomic<uint64_t>* count_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const absl::Status&)> tell_ ABSL_GUARDED_BY(mutex_);
};

// What CountIn()'s counter says once nothing is kept any more: no folder matches it.
inline constexpr uint64_t kStateBroken = ~uint64_t{0} - 1;

}  // namespace heavywater
