// What values keep for a restart, and how they go on from it.
#include <algorithm>
#include <cstring>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/blob_store.h"

namespace heavywater {
namespace {

constexpr int64_t kTextUnit = sizeof(int64_t);
constexpr int64_t kMaxTextBytes = 1 << 16;

// Numbers, eight characters in each.
void AddText(const std::string& text, RecordWriter& record) {
  record.Add(static_cast<int64_t>(text.size()));
  for (size_t first = 0; first < text.size(); first += kTextUnit) {
    int64_t unit = 0;
    std::memcpy(&unit, text.data() + first, std::min<size_t>(kTextUnit, text.size() - first));
    record.Add(unit);
  }
}

std::string NextText(RecordReader& record) {
  const int64_t size = std::clamp<int64_t>(record.Next(), 0, kMaxTextBytes);
  std::string text(size, '\0');
  for (int64_t first = 0; first < size; first += kTextUnit) {
    const int64_t unit = record.Next();
    std::memcpy(text.data() + first, &unit, std::min(kTextUnit, size - first));
  }
  return text;
}

}  // namespace

void BlobStore::Save(const BlobKey& key, const Blob& blob) {
  if (state_ == nullptr) return;
  RecordWriter record;
  record.Add(blob.bytes);
  AddText(key.space, record);
  AddText(key.key, record);
  StateBatch batch;
  batch.Put(StateKey(StateKind::kBlob, blob.sequence), record.Take());
  if (!blob.tenant.empty()) {
    RecordWriter tenant;
    AddText(blob.tenant, tenant);
    batch.Put(StateKey(StateKind::kBlobTenant, blob.sequence), tenant.Take());
  }
  state_->Apply(batch);
}

void BlobStore::SaveEnd(SequenceId sequence) {
  if (state_ == nullptr) return;
  StateBatch batch;
  batch.Delete(StateKey(StateKind::kBlob, sequence));
  batch.Delete(StateKey(StateKind::kBlobTenant, sequence));
  state_->Apply(batch);
}

absl::Status BlobStore::LoadTenants(absl::flat_hash_map<SequenceId, std::string>* tenants) const {
  return state_->ForEach(StateKey(StateKind::kBlobTenant),
                         [tenants](std::string_view key, std::string_view value) -> absl::Status {
                           HW_ASSIGN_OR_RETURN(const StateId id, ParseStateKey(key));
                           RecordReader record(value);
                           (*tenants)[id.id] = NextText(record);
                           return record.Finish();
                         });
}

bool BlobStore::IsWhole(const Blob& blob) const {
  return store_.Watermark(blob.sequence, /*rank=*/0) == blob.num_rows() &&
         store_.SequenceBytes(blob.sequence) == blob.num_pages() * blob.page_bytes;
}

absl::StatusOr<std::vector<SequenceId>> BlobStore::Restore(const std::vector<SequenceId>& live) {
  absl::flat_hash_set<SequenceId> others(live.begin(), live.end());
  std::vector<SequenceId> dropped;
  absl::flat_hash_map<SequenceId, std::string> tenants;
  HW_RETURN_IF_ERROR(LoadTenants(&tenants));
  HW_RETURN_IF_ERROR(state_->ForEach(
      StateKey(StateKind::kBlob),
      [&](std::string_view key, std::string_view value) -> absl::Status {
        HW_ASSIGN_OR_RETURN(const StateId id, ParseStateKey(key));
        RecordReader record(value);
        const int64_t bytes = record.Next();
        const BlobKey blob_key = {.space = NextText(record), .key = NextText(record)};
        if (!record.Finish().ok() || bytes < 1 || bytes > kMaxBlobBytes ||
            (id.id & kBlobSequenceBit) == 0) {
          return absl::DataLossError(absl::StrCat("the record of value ", id.id, " is damaged"));
        }
        Blob blob = Blob::LayOut(bytes);
        blob.sequence = id.id;
        if (const auto tenant = tenants.find(id.id); tenant != tenants.end()) {
          blob.tenant = tenant->second;
          store_.SetOwner(id.id, blob.tenant, PageDtype::kOpaque);
        }
        others.erase(id.id);
        MutexLock lock(&mutex_);
        next_sequence_ = std::max(next_sequence_, (id.id & ~kBlobSequenceBit) + 1);
        if (IsWhole(blob) && index_.find(ViewOf(blob_key)) == index_.end()) {
          PutIn(blob_key, blob);
        } else {
          dropped.push_back(id.id);
        }
        return absl::OkStatus();
      }));
  {
    MutexLock lock(&mutex_);
    while (!items_.empty() && !FitsWith(0, 0)) dropped.push_back(DropFirst());
  }
  Release(dropped);
  return std::vector<SequenceId>(others.begin(), others.end());
}

}  // namespace heavywater
