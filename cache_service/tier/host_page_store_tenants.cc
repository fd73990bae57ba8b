// Whose the pages are, and which stay where they are.
#include <utility>

#include "cache_service/tier/host_page_store.h"

namespace heavywater {

void HostPageStore::Recount(Entry& entry) {
  const SequencePages& pages = entry.pages;
  const SequenceSpec& spec = pages.spec();
  const int64_t page_bytes = spec.geometry.page_bytes();
  const int64_t in_host = pages.num_host_pages() + pages.num_contested();
  TenantUse now = {.host_bytes = in_host * Slab::RoundUp(page_bytes),
                   .lower_bytes = (pages.num_pages() - pages.num_host_pages()) * page_bytes,
                   .sequences = entry.released || IsValue(spec.sequence) ? 0 : 1};
  {
    MutexLock lock(&mutex_);
    now.host_bytes += entry.promised_bytes;
  }
  const TenantUse before = std::exchange(entry.held, now);
  tenants_.Change(spec.tenant, {.host_bytes = now.host_bytes - before.host_bytes,
                                .lower_bytes = now.lower_bytes - before.lower_bytes,
                                .sequences = now.sequences - before.sequences});
}

absl::Status HostPageStore::HoldHost(Entry& entry, int64_t bytes) {
  const absl::Status held = tenants_.TryHold(entry.pages.spec().tenant, {.host_bytes = bytes});
  if (held.ok()) entry.held.host_bytes += bytes;
  return held;
}

void HostPageStore::ReturnHost(Entry& entry, int64_t bytes) {
  entry.held.host_bytes -= bytes;
  tenants_.Change(entry.pages.spec().tenant, {.host_bytes = -bytes});
}

absl::Status HostPageStore::CheckHostQuota(SequenceId sequence, int64_t bytes) {
  const absl::StatusOr<EntryPtr> entry = Find(sequence);
  if (!entry.ok()) return entry.status();
  MutexLock entry_lock(&(*entry)->mutex);
  const absl::Status held = HoldHost(**entry, bytes);
  if (held.ok()) ReturnHost(**entry, bytes);
  return held;
}

void HostPageStore::SetPinned(SequenceId sequence, bool pinned) {
  const absl::StatusOr<EntryPtr> entry = Find(sequence);
  if (!entry.ok()) return;
  MutexLock entry_lock(&(*entry)->mutex);
  (*entry)->pinned = pinned;
}

void HostPageStore::SetOwner(SequenceId sequence, const std::string& tenant, PageDtype dtype) {
  const absl::StatusOr<EntryPtr> entry = Find(sequence);
  if (!entry.ok()) return;
  MutexLock entry_lock(&(*entry)->mutex);
  SequencePages& pages = (*entry)->pages;
  const TenantUse held = (*entry)->held;
  tenants_.Change(pages.spec().tenant, {.host_bytes = -held.host_bytes,
                                        .lower_bytes = -held.lower_bytes,
                                        .sequences = -held.sequences});
  tenants_.Change(tenant, held);
  pages.SetOwner(tenant, dtype);
}

}  // namespace heavywater
