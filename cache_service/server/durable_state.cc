#include "cache_service/server/durable_state.h"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/tier/stale_slabs.h"
#ifdef HEAVYWATER_STATE_FOLDER
#include "cache_service/tier/state_folder.h"
#endif

namespace heavywater {
namespace {

constexpr char kSlabPrefix[] = "heavywater-slab-";
constexpr char kKeptSlabPrefix[] = "heavywater-state-";

std::string NewStoreId() {
  std::random_device random;
  return absl::StrFormat("%08x%08x", random(), random());
}

void RemoveStale(const v1::CacheConfig& config) {
  int stale = RemoveStaleSlabs(kSlabPrefix);
  if (!config.slab_name().empty()) stale += RemoveStaleSlab(config.slab_name()) ? 1 : 0;
  if (stale > 0) LogWarn("removed slabs that killed services had left", {{"slabs", stale}});
}

// A state_dir that is taken out of the configuration leaves its slab, which no service may
// remove: another one may be about to come back to it.
void TellWaitingSlabs(const std::string& own) {
  for (const WaitingSlab& slab : FindWaitingSlabs(kKeptSlabPrefix)) {
    if (slab.name == own) continue;
    LogWarn(
        "a slab waits in shared memory for a service with its state_dir; if there is none any "
        "more, remove the file",
        {{"file", absl::StrCat("/dev/shm/", slab.name)}, {"bytes", slab.bytes}});
  }
}

absl::StatusOr<DurableState> WithoutState(const v1::CacheConfig& config) {
  DurableState state = {.redis_store_id = NewStoreId()};
  std::string name;
  if (!config.disable_slab()) {
    RemoveStale(config);
    // Process ids repeat in containers: time and count make the name unique.
    static std::atomic<int> count = 0;
    name = config.slab_name().empty()
               ? absl::StrFormat("%s%d-%x-%d", kSlabPrefix, getpid(),
                                 absl::ToUnixMicros(Clock::Real().Now()), ++count)
               : config.slab_name();
  }
  HW_ASSIGN_OR_RETURN(state.slab, Slab::Create(name, config.host_bytes()));
  return state;
}

#ifdef HEAVYWATER_STATE_FOLDER

// Found again without asking the state: it may be damaged.
std::string SlabName(const v1::CacheConfig& config) {
  if (!config.slab_name().empty()) return config.slab_name();
  std::error_code ignored;
  const std::string path = std::filesystem::weakly_canonical(config.state_dir(), ignored).string();
  return absl::StrFormat("%s%d-%08x", kKeptSlabPrefix, getuid(),
                         Crc32c(std::as_bytes(std::span<const char>(path))));
}

template <typename Value>
absl::Status CheckSame(const char* field, const Value& kept, const Value& now) {
  if (kept == now) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(field, " was \"", kept, "\" and is \"", now, "\" now"));
}

absl::StatusOr<v1::StateHeader> ReadHeader(const StateFolder& folder) {
  v1::StateHeader header;
  bool found = false;
  HW_RETURN_IF_ERROR(
      folder.ForEach(StateKey(StateKind::kHeader), [&](std::string_view, std::string_view value) {
        found = header.ParseFromArray(value.data(), static_cast<int>(value.size()));
        return found ? absl::OkStatus() : absl::DataLossError("its header is damaged");
      }));
  if (!found) return absl::NotFoundError("there is none");
  return header;
}

// The service goes on without; whoever runs it learns that the next restart begins anew.
void LogWhenBroken(const v1::CacheConfig& config, StateFolder& folder) {
  folder.WhenBroken([path = config.state_dir()](const absl::Status& why) {
    LogError("the state is kept no more: the next start begins anew, with no sequences",
             {{"state_dir", path}, {"reason", std::string(why.message())}});
  });
}

// NOT_FOUND: there is nothing to take over. DATA_LOSS and others: it does not fit.
absl::StatusOr<DurableState> TakeOver(const v1::CacheConfig& config,
                                      std::unique_ptr<StateFolder> folder) {
  HW_ASSIGN_OR_RETURN(const v1::StateHeader header, ReadHeader(*folder));
  if (const absl::Status same = CheckSame("slab_name", header.slab_name(), SlabName(config));
      !same.ok()) {
    RemoveStaleSlab(header.slab_name());  // nobody else will ask for it
    return same;
  }
  HW_RETURN_IF_ERROR(CheckSame("disk_path", header.disk_path(), config.disk_path()));
  HW_RETURN_IF_ERROR(CheckSame("redis_address", header.redis_address(), config.redis_address()));
  DurableState state = {.redis_store_id = header.redis_store_id(), .restores = true};
  absl::StatusOr<std::unique_ptr<Slab>> slab =
      Slab::Adopt(header.slab_name(), header.slab_bytes(), header.slab_nonce());
  if (absl::IsNotFound(slab.status())) {
    return absl::DataLossError(absl::StrCat("its slab is gone: ", slab.status().message()));
  }
  HW_RETURN_IF_ERROR(slab.status());
  state.slab = *std::move(slab);
  const uint64_t changes = state.slab->state_changes();
  if (!folder->Matches(changes)) {
    return absl::DataLossError(
        absl::StrCat("it has ", folder->num_changes(), " changes, the slab was left after ",
                     changes, changes == kStateBroken ? " (it could not be kept)" : ""));
  }
  HW_RETURN_IF_ERROR(
      CheckSame("host_bytes", state.slab->total_bytes(), Slab::RoundUp(config.host_bytes())));
  state.slab->Keep();
  folder->CountIn(state.slab->state_changes());
  LogWhenBroken(config, *folder);
  state.store = std::move(folder);
  return state;
}

absl::StatusOr<DurableState> BeginAnew(const v1::CacheConfig& config) {
  HW_ASSIGN_OR_RETURN(std::unique_ptr<StateFolder> folder,
                      StateFolder::OpenAnew(config.state_dir()));
  RemoveStale(config);
  RemoveStaleSlab(SlabName(config), /*unfinished_too=*/true);  // the folder's lock is held
  DurableState state = {.redis_store_id = NewStoreId()};
  HW_ASSIGN_OR_RETURN(state.slab, Slab::Create(SlabName(config), config.host_bytes()));
  v1::StateHeader header;
  header.set_slab_name(state.slab->name());
  header.set_slab_bytes(state.slab->object_bytes());
  header.set_slab_nonce(state.slab->nonce());
  header.set_disk_path(config.disk_path());
  header.set_redis_address(config.redis_address());
  header.set_redis_store_id(state.redis_store_id);
  StateBatch batch;
  batch.Put(StateKey(StateKind::kHeader), header.SerializeAsString());
  state.slab->Keep();
  folder->CountIn(state.slab->state_changes());
  folder->Apply(batch);
  HW_RETURN_IF_ERROR(folder->broken());
  LogWhenBroken(config, *folder);
  state.store = std::move(folder);
  return state;
}

absl::StatusOr<DurableState> OpenKept(const v1::CacheConfig& config) {
  absl::StatusOr<std::unique_ptr<StateFolder>> folder = StateFolder::Open(config.state_dir());
  auto state = folder.ok() ? TakeOver(config, *std::move(folder))
                           : absl::StatusOr<DurableState>(folder.status());
  if (absl::IsNotFound(state.status())) return BeginAnew(config);
  if (!absl::IsDataLoss(state.status())) return state;
  return DiscardDurableState(config, state.status());
}

#endif

}  // namespace

absl::StatusOr<DurableState> OpenDurableState(const v1::CacheConfig& config) {
  if (config.state_dir().empty()) {
    TellWaitingSlabs("");
    return WithoutState(config);
  }
#ifdef HEAVYWATER_STATE_FOLDER
  TellWaitingSlabs(SlabName(config));
  return OpenKept(config);
#else
  return absl::InvalidArgumentError("state_dir: this build keeps no state (RocksDB)");
#endif
}

absl::StatusOr<DurableState> DiscardDurableState(const v1::CacheConfig& config,
                                                 const absl::Status& why) {
#ifdef HEAVYWATER_STATE_FOLDER
  LogError("the kept state is discarded: groups and sequences begin anew",
           {{"state_dir", config.state_dir()}, {"reason", std::string(why.message())}});
  return BeginAnew(config);
#else
  return why;
#endif
}

}  // namespace heavywater
