// Values by key over a page store: each is a sequence of its own there, so that it is
// checked, moved between tiers and read as pages are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/page_store.h"
#include "cache_service/tier/slab_format.h"
#include "cache_service/tier/state_store.h"
#include "cache_service/tier/tenant_book.h"

namespace heavywater {

inline constexpr int64_t kMaxBlobBytes = 64 << 20;
inline constexpr int64_t kMaxBlobPageBytes = 1 << 20;

// Names a value: equal keys of a space mean equal bytes.
struct BlobKey {
  std::string space;
  std::string key;
};

struct BlobStoreOptions {
  int64_t max_bytes = 0;        // of all tiers together; 0: nothing may be stored
  int64_t max_blobs = 1 << 17;  // each takes up to 1 KiB beside its pages
  // Of values that are being stored, beside the first: their pages cannot leave the slab.
  int64_t max_writing_bytes = std::numeric_limits<int64_t>::max();
  // Numbers go up from here: none of an earlier process may come again while its pages
  // are still being erased.
  SequenceId first_sequence = 1;
};

struct BlobStoreStats {
  int64_t blobs = 0;       // that can be read
  int64_t held_bytes = 0;  // rounded up to pages; of those being written, too
  int64_t hits = 0;        // of Find()
  int64_t misses = 0;
  int64_t dropped = 0;  // to make room, or since their bytes were lost
  int64_t refused = 0;  // found no room
};

// Thread safe. Ends nothing of the page store but its own.
class BlobStore {
 public:
  static constexpr int64_t kRowBytes = kSlabUnitBytes;  // so that pages waste no unit

  // Where a value lies.
  struct Blob {
    SequenceId sequence = 0;
    int64_t bytes = 0;
    int64_t page_bytes = 0;   // at most kMaxBlobPageBytes
    std::string tenant = {};  // whose quota bounds it

    // As few pages as hold it, of one size; `bytes` of 1 to kMaxBlobBytes.
    static Blob LayOut(int64_t bytes);
    int64_t num_pages() const { return (bytes + page_bytes - 1) / page_bytes; }
    int64_t num_rows() const { return num_pages() * (page_bytes / kRowBytes); }
    // What the slab gives for it: pages, and a unit for its watermark.
    int64_t held_bytes() const { return num_pages() * page_bytes + kSlabUnitBytes; }
  };

  // The page store and the state (where it keeps what a restart needs; may be null) must
  // outlive it.
  BlobStore(PageStore& store, const BlobStoreOptions& options, StateStore* state = nullptr)
      : store_(store), options_(options), state_(state), next_sequence_(options.first_sequence) {}

  // After a restart, before anything else. `live`: the sequences whose pages the store has
  // taken over. Goes on with the values among them, as far as the limits allow; returns
  // the others. DATA_LOSS.
  absl::StatusOr<std::vector<SequenceId>> Restore(const std::vector<SequenceId>& live);

  // A value on its way in. Not thread safe; the blob store must outlive it. Nothing stays
  // of it without Commit().
  class Writer {
   public:
    ~Writer();
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;

    // What follows. INVALID_ARGUMENT: more than the value was to have.
    absl::Status Append(std::span<const std::byte> bytes);
    int64_t missing_bytes() const { return blob_.bytes - received_; }
    // The value can be read from now on. Call it once, when no bytes are missing.
    absl::Status Commit();

   private:
    friend class BlobStore;
    Writer(BlobStore& blobs, BlobKey key, const Blob& blob)
        : blobs_(blobs), key_(std::move(key)), blob_(blob) {}
    absl::Status WritePage();

    BlobStore& blobs_;
    const BlobKey key_;
    const Blob blob_;
    std::vector<std::byte> page_;  // as far as it has come
    int64_t received_ = 0;
    int64_t pages_written_ = 0;
    bool committed_ = false;
  };

  // ALREADY_EXISTS: it is there (a use); FAILED_PRECONDITION: with another size, or this
  // store takes nothing. RESOURCE_EXHAUSTED naming need and limit: no room, although the
  // longest unused were dropped as far as that could help (the tenant's own, where its quota
  // is full).
  absl::StatusOr<std::unique_ptr<Writer>> Begin(const BlobKey& key, int64_t bytes,
                                                const std::string& tenant = "");

  bool Has(const BlobKey& key);                   // a use
  absl::StatusOr<Blob> Find(const BlobKey& key);  // a use; NOT_FOUND
  // The part of the value that one of its pages holds. NOT_FOUND: dropped meanwhile, or
  // lost; UNAVAILABLE, DATA_LOSS: as PageStore::Read().
  absl::Status ReadPage(const Blob& blob, int64_t page, std::string* bytes);
  int TierOf(const Blob& blob, int64_t page) const;
  // ReadPage() has found it lost: it is not there any more, unless it is new since.
  void DropLost(const BlobKey& key, const Blob& blob);

  bool Erase(const BlobKey& key);
  int64_t EraseSpace(std::string_view space);  // how many

  const BlobStoreOptions& options() const { return options_; }
  BlobStoreStats Stats() const;

 private:
  struct Item {
    BlobKey key;
    Blob blob;
  };
  using Items = std::list<Item>;
  // Of an item's key, which stays where it is.
  using KeyView = std::pair<std::string_view, std::string_view>;
  static KeyView ViewOf(const BlobKey& key) { return {key.space, key.key}; }

  // The item, moved to the end; null.
  const Item* Use(const BlobKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Its pages are to be released by the caller, without the mutex.
  SequenceId TakeOut(Items::iterator item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same, counted as dropped: of the item, and of the longest unused one.
  SequenceId Drop(Items::iterator item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  SequenceId DropFirst() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return Drop(items_.begin()); }
  void Release(std::span<const SequenceId> sequences);
  // Makes it one that can be read, the last to go.
  void PutIn(const BlobKey& key, const Blob& blob) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool FitsWith(int64_t more_bytes, int64_t more_blobs) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // --- What a restart needs --- (blob_store_state.cc)
  void Save(const BlobKey& key, const Blob& blob);
  // Before its pages are released.
  void SaveEnd(SequenceId sequence);
  absl::Status LoadTenants(absl::flat_hash_map<SequenceId, std::string>* tenants) const;
  // Whether the pages of the record's value are there, all of them.
  bool IsWhole(const Blob& blob) const;

  // A share of the limits, before anything of the value is stored.
  absl::Status Claim(const Blob& blob);
  // Which of the limits refuses it beside those that are being written.
  absl::Status CheckBesideWriters(int64_t need) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndClaim(const Blob& blob);
  absl::Status OpenPages(const Blob& blob);
  absl::Status TryOpenPages(const Blob& blob);
  // Drops the longest unused (of the tenant) until `bytes` less are held. False, and nothing
  // is dropped, when all of them hold less.
  bool DropUnused(int64_t bytes, const std::optional<std::string>& tenant);

  PageStore& store_;
  const BlobStoreOptions options_;
  StateStore* const state_;
  mutable Mutex mutex_;
  Items items_ ABSL_GUARDED_BY(mutex_);  // the longest unused first
  absl::flat_hash_map<KeyView, Items::iterator> index_ ABSL_GUARDED_BY(mutex_);
  SequenceId next_sequence_ ABSL_GUARDED_BY(mutex_);
  int64_t num_writers_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t writers_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // held by what they write
  BlobStoreStats counters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
