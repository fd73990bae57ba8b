#include "cache_service/tier/blob_store.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/shortage.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/slab_format.h"

namespace heavywater {
namespace {

using Blob = BlobStore::Blob;

constexpr int64_t kRowBytes = BlobStore::kRowBytes;
constexpr FingerprintId kBlobFingerprint = 0x626f6c62;
constexpr absl::Duration kRetryAfter = absl::Seconds(1);
// Room that was made can go to others before it is taken.
constexpr int kMaxRounds = 4;

PageGeometry GeometryOf(const Blob& blob) {
  return {.num_layers = 1,
          .num_kv_heads = 1,
          .page_tokens = static_cast<int>(blob.page_bytes / kRowBytes),
          .row_bytes = static_cast<int>(kRowBytes)};
}

// Positions are rows here.
RowRange RowsOf(const Blob& blob, int64_t page, int64_t num_rows) {
  return {.sequence = blob.sequence,
          .first_position = page * (blob.page_bytes / kRowBytes),
          .num_positions = num_rows};
}

absl::Status LimitReached(const char* what, int64_t need, int64_t limit, bool may_pass) {
  return ExhaustedError(absl::StrCat(what, ": the value needs ", need, " of ", limit,
                                     may_pass ? ", which values that are being written hold" : ""),
                        {.subject = what,
                         .need = need,
                         .limit = limit,
                         .retry_after = may_pass ? kRetryAfter : absl::InfiniteDuration()});
}

}  // namespace

Blob Blob::LayOut(int64_t bytes) {
  const int64_t pages = (bytes + kMaxBlobPageBytes - 1) / kMaxBlobPageBytes;
  const int64_t rows = (bytes + pages * kRowBytes - 1) / (pages * kRowBytes);
  return {.bytes = bytes, .page_bytes = rows * kRowBytes};
}

BlobStore::Writer::~Writer() {
  if (committed_) return;
  blobs_.Release({&blob_.sequence, 1});
  blobs_.EndClaim(blob_);
}

absl::Status BlobStore::Writer::Append(std::span<const std::byte> bytes) {
  if (static_cast<int64_t>(bytes.size()) > missing_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("data: ", bytes.size(), " bytes came, ",
                                                   missing_bytes(), " of total_bytes ", blob_.bytes,
                                                   " are missing"));
  }
  while (!bytes.empty()) {
    const auto room = static_cast<size_t>(blob_.page_bytes) - page_.size();
    const std::span<const std::byte> part = bytes.first(std::min(room, bytes.size()));
    page_.insert(page_.end(), part.begin(), part.end());
    received_ += static_cast<int64_t>(part.size());
    bytes = bytes.subspan(part.size());
    if (static_cast<int64_t>(page_.size()) == blob_.page_bytes) HW_RETURN_IF_ERROR(WritePage());
  }
  return absl::OkStatus();
}

absl::Status BlobStore::Writer::WritePage() {
  page_.resize(blob_.page_bytes);  // only a full page is sealed, so checked when it is read
  const RowRange rows = RowsOf(blob_, pages_written_, blob_.page_bytes / kRowBytes);
  HW_RETURN_IF_ERROR(blobs_.store_.Write(/*rank=*/0, rows, page_));
  ++pages_written_;
  page_.clear();
  return absl::OkStatus();
}

absl::Status BlobStore::Writer::Commit() {
  HW_CHECK(!committed_ && missing_bytes() == 0);
  if (!page_.empty()) HW_RETURN_IF_ERROR(WritePage());
  HW_RETURN_IF_ERROR(blobs_.store_.Commit(blob_.sequence, /*rank=*/0, blob_.num_rows()));
  blobs_.store_.StopWriter(blob_.sequence, /*rank=*/0);  // it may go down from now on
  blobs_.Save(key_, blob_);  // of two copies both, of which one goes again
  MutexLock lock(&blobs_.mutex_);
  // Somebody else may have been faster with the same bytes: this copy then goes.
  if (blobs_.Use(key_) != nullptr) return absl::OkStatus();
  --blobs_.num_writers_;
  blobs_.writers_bytes_ -= blob_.held_bytes();
  blobs_.PutIn(key_, blob_);
  committed_ = true;
  return absl::OkStatus();
}

void BlobStore::PutIn(const BlobKey& key, const Blob& blob) {
  const auto item = items_.insert(items_.end(), {key, blob});
  index_.emplace(ViewOf(item->key), item);
  counters_.held_bytes += blob.held_bytes();
}

bool BlobStore::FitsWith(int64_t more_bytes, int64_t more_blobs) const {
  const int64_t blobs = static_cast<int64_t>(items_.size()) + num_writers_;
  return counters_.held_bytes + writers_bytes_ + more_bytes <= options_.max_bytes &&
         blobs + more_blobs <= options_.max_blobs;
}

absl::StatusOr<std::unique_ptr<BlobStore::Writer>> BlobStore::Begin(const BlobKey& key,
                                                                    int64_t bytes,
                                                                    const std::string& tenant) {
  if (options_.max_bytes == 0) {
    return absl::FailedPreconditionError(
        "blob_bytes is 0 in the cache service's configuration: it takes no values by key");
  }
  if (bytes < 1 || bytes > kMaxBlobBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("total_bytes is ", bytes, ", want 1 to ", kMaxBlobBytes));
  }
  Blob blob = Blob::LayOut(bytes);
  blob.tenant = tenant;
  {
    MutexLock lock(&mutex_);
    if (const Item* const item = Use(key); item != nullptr) {
      if (item->blob.bytes == bytes) return absl::AlreadyExistsError("the key has its value");
      return absl::FailedPreconditionError(
          absl::StrCat("total_bytes is ", bytes, ", but the key's value has ", item->blob.bytes));
    }
    blob.sequence = next_sequence_++ | kBlobSequenceBit;
  }
  absl::Status status = Claim(blob);
  if (status.ok()) {
    status = OpenPages(blob);
    if (!status.ok()) EndClaim(blob);
  }
  if (status.ok()) return std::unique_ptr<Writer>(new Writer(*this, key, blob));
  MutexLock lock(&mutex_);
  if (absl::IsResourceExhausted(status)) ++counters_.refused;
  return status;
}

absl::Status BlobStore::Claim(const Blob& blob) {
  const int64_t need = blob.held_bytes();
  if (need > options_.max_bytes) {
    return LimitReached("blob_bytes", need, options_.max_bytes, /*may_pass=*/false);
  }
  std::vector<SequenceId> dropped;
  absl::Status status;
  {
    MutexLock lock(&mutex_);
    status = CheckBesideWriters(need);
    if (status.ok()) {
      while (!FitsWith(need, 1) && !items_.empty()) dropped.push_back(DropFirst());
      HW_CHECK(FitsWith(need, 1));
      ++num_writers_;
      writers_bytes_ += need;
    }
  }
  Release(dropped);
  return status;
}

// Values that are being stored lie in the slab until they are whole. None is dropped for
// what does not fit beside them.
absl::Status BlobStore::CheckBesideWriters(int64_t need) const {
  if (num_writers_ >= options_.max_blobs) {
    return LimitReached("max_blobs", 1, options_.max_blobs, /*may_pass=*/true);
  }
  if (writers_bytes_ + need > options_.max_bytes) {
    return LimitReached("blob_bytes", need, options_.max_bytes, /*may_pass=*/true);
  }
  if (num_writers_ > 0 && writers_bytes_ + need > options_.max_writing_bytes) {
    return LimitReached("a quarter of host_bytes for values on their way in", need,
                        options_.max_writing_bytes, /*may_pass=*/true);
  }
  return absl::OkStatus();
}

void BlobStore::EndClaim(const Blob& blob) {
  MutexLock lock(&mutex_);
  --num_writers_;
  writers_bytes_ -= blob.held_bytes();
}

absl::Status BlobStore::OpenPages(const Blob& blob) {
  absl::Status status = TryOpenPages(blob);
  for (int round = 0; round < kMaxRounds && absl::IsResourceExhausted(status); ++round) {
    if (!store_.MakeRoom(status).ok()) {
      const std::optional<Shortage> shortage = ShortageOf(status);
      const int64_t missing =
          shortage.has_value() ? shortage->need - shortage->available : blob.held_bytes();
      const std::optional<TenantShortage> tenant = TenantShortageOf(status);
      const auto whose = tenant.has_value() ? std::optional(tenant->tenant) : std::nullopt;
      if (shortage.has_value() && shortage->need > shortage->limit) return status;
      if (!DropUnused(missing, whose)) return status;
    }
    status = TryOpenPages(blob);
  }
  return status;
}

absl::Status BlobStore::TryOpenPages(const Blob& blob) {
  HW_RETURN_IF_ERROR(store_.Open({.sequence = blob.sequence,
                                  .fingerprint = kBlobFingerprint,
                                  .geometry = GeometryOf(blob),
                                  .max_tokens = blob.num_rows(),
                                  .prompt_tokens = blob.num_rows(),
                                  .tenant = blob.tenant}));
  const absl::Status reserved =
      store_
          .Reserve({.sequence = blob.sequence, .heads = {0, 1}, .num_pages = blob.num_pages()},
                   /*direct=*/false)
          .status();
  if (!reserved.ok()) Release({&blob.sequence, 1});
  return reserved;
}

bool BlobStore::DropUnused(int64_t bytes, const std::optional<std::string>& tenant) {
  std::vector<SequenceId> dropped;
  {
    MutexLock lock(&mutex_);
    const auto is_meant = [&tenant](const Item& item) {
      return !tenant.has_value() || item.blob.tenant == *tenant;
    };
    std::vector<Items::iterator> unused;
    int64_t held = 0;
    for (auto item = items_.begin(); item != items_.end() && held < bytes; ++item) {
      if (!is_meant(*item)) continue;
      held += item->blob.held_bytes();
      unused.push_back(item);
    }
    if (held < bytes || unused.empty()) return false;
    for (const Items::iterator item : unused) dropped.push_back(Drop(item));
  }
  Release(dropped);
  return true;
}

SequenceId BlobStore::Drop(Items::iterator item) {
  ++counters_.dropped;
  return TakeOut(item);
}

SequenceId BlobStore::TakeOut(Items::iterator item) {
  const Blob blob = item->blob;
  index_.erase(ViewOf(item->key));
  items_.erase(item);
  counters_.held_bytes -= blob.held_bytes();
  return blob.sequence;
}

// What is not there any more has been released by somebody else.
void BlobStore::Release(std::span<const SequenceId> sequences) {
  for (const SequenceId sequence : sequences) {
    SaveEnd(sequence);
    store_.Release(sequence).IgnoreError();
  }
}

const BlobStore::Item* BlobStore::Use(const BlobKey& key) {
  const auto found = index_.find(ViewOf(key));
  if (found == index_.end()) return nullptr;
  items_.splice(items_.end(), items_, found->second);
  return &*found->second;
}

bool BlobStore::Has(const BlobKey& key) {
  MutexLock lock(&mutex_);
  return Use(key) != nullptr;
}

absl::StatusOr<Blob> BlobStore::Find(const BlobKey& key) {
  MutexLock lock(&mutex_);
  const Item* const item = Use(key);
  if (item == nullptr) {
    ++counters_.misses;
    return absl::NotFoundError("the key has no value");
  }
  ++counters_.hits;
  return item->blob;
}

absl::Status BlobStore::ReadPage(const Blob& blob, int64_t page, std::string* bytes) {
  const int64_t size = std::min(blob.page_bytes, blob.bytes - page * blob.page_bytes);
  const int64_t num_rows = (size + kRowBytes - 1) / kRowBytes;
  bytes->resize(num_rows * kRowBytes);
  HW_RETURN_IF_ERROR(
      store_.Read(RowsOf(blob, page, num_rows), std::as_writable_bytes(std::span<char>(*bytes))));
  bytes->resize(size);
  return absl::OkStatus();
}

int BlobStore::TierOf(const Blob& blob, int64_t page) const {
  return store_.TierOf(RowsOf(blob, page, 1));
}

void BlobStore::DropLost(const BlobKey& key, const Blob& blob) {
  {
    MutexLock lock(&mutex_);
    const auto found = index_.find(ViewOf(key));
    if (found == index_.end() || found->second->blob.sequence != blob.sequence) return;
    TakeOut(found->second);
    ++counters_.dropped;
  }
  Release({&blob.sequence, 1});
}

bool BlobStore::Erase(const BlobKey& key) {
  SequenceId sequence = 0;
  {
    MutexLock lock(&mutex_);
    const auto found = index_.find(ViewOf(key));
    if (found == index_.end()) return false;
    sequence = TakeOut(found->second);
  }
  Release({&sequence, 1});
  return true;
}

int64_t BlobStore::EraseSpace(std::string_view space) {
  std::vector<SequenceId> sequences;
  {
    MutexLock lock(&mutex_);
    for (auto item = items_.begin(); item != items_.end();) {
      const auto next = std::next(item);
      if (item->key.space == space) sequences.push_back(TakeOut(item));
      item = next;
    }
  }
  Release(sequences);
  return static_cast<int64_t>(sequences.size());
}

BlobStoreStats BlobStore::Stats() const {
  MutexLock lock(&mutex_);
  BlobStoreStats stats = counters_;
  stats.blobs = static_cast<int64_t>(items_.size());
  stats.held_bytes += writers_bytes_;
  return stats;
}

}  // namespace heavywater
