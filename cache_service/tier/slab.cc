#include "cache_service/tier/slab.h"

#include <algorithm>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// Memory is taken from the system in steps, so that a reservation of small pages
// does not cost a system call each.
constexpr int64_t kCommitStepBytes = 16 << 20;

// Positive in int64 as well, for clients whose language has no unsigned type.
uint64_t RandomNonce() {
  std::random_device random;
  return ((uint64_t{random()} << 32 | random()) >> 1) | 1;
}

}  // namespace

int64_t Slab::RoundUp(int64_t bytes) {
  return (bytes + kSlabUnitBytes - 1) / kSlabUnitBytes * kSlabUnitBytes;
}

absl::StatusOr<std::unique_ptr<Slab>> Slab::Create(const std::string& name, int64_t bytes) {
  if (bytes < kSlabUnitBytes || bytes > int64_t{1} << 46) {
    return absl::InvalidArgumentError(
        absl::StrCat("host_bytes is ", bytes, ", want ", kSlabUnitBytes, " to 2^46"));
  }
  HW_ASSIGN_OR_RETURN(auto memory, SharedMemory::Create(name, kSlabUnitBytes + RoundUp(bytes)));
  auto slab = std::unique_ptr<Slab>(new Slab(std::move(memory), RandomNonce()));
  HW_RETURN_IF_ERROR(slab->CommitUpTo(kSlabUnitBytes));
  SlabHeader& header = slab->header();
  header.format_version = kSlabFormatVersion;
  header.header_bytes = kSlabUnitBytes;
  header.total_bytes = slab->object_bytes();
  header.nonce = slab->nonce();
  header.magic = kSlabMagic;  // last: with it the header is whole
  return slab;
}

absl::StatusOr<std::unique_ptr<Slab>> Slab::Adopt(const std::string& name, int64_t object_bytes,
                                                  uint64_t nonce) {
  if (object_bytes < 2 * kSlabUnitBytes || object_bytes % kSlabUnitBytes != 0) {
    return absl::DataLossError(
        absl::StrCat("slab \"", name, "\" cannot have ", object_bytes, " bytes"));
  }
  absl::StatusOr<std::unique_ptr<SharedMemory>> memory = SharedMemory::Adopt(name, object_bytes);
  if (absl::IsFailedPrecondition(memory.status())) {  // another size
    return absl::DataLossError(memory.status().message());
  }
  HW_RETURN_IF_ERROR(memory.status());
  auto slab = std::unique_ptr<Slab>(new Slab(*std::move(memory), nonce));
  const SlabHeader& header = slab->header();
  const auto differs = [&](const char* field, auto has, auto want) {
    slab->memory_->Keep();  // not ours
    return absl::DataLossError(
        absl::StrCat("slab \"", name, "\" has ", field, " ", has, ", want ", want));
  };
  if (header.magic != kSlabMagic) return differs("magic", header.magic, kSlabMagic);
  if (header.format_version != kSlabFormatVersion) {
    return differs("format version", header.format_version, kSlabFormatVersion);
  }
  if (header.nonce != nonce) return differs("nonce", header.nonce, nonce);
  slab->committed_bytes_ = std::clamp<int64_t>(header.committed_bytes, 0, object_bytes);
  return slab;
}

void Slab::Keep() {
  header().kept = 1;
  memory_->Keep();
}

absl::Status Slab::Take(int64_t offset, int64_t bytes) {
  const bool aligned = offset % kSlabUnitBytes == 0 && bytes > 0;
  if (aligned && units_.Take(offset / kSlabUnitBytes - 1, RoundUp(bytes) / kSlabUnitBytes)) {
    return CommitUpTo(offset + RoundUp(bytes));
  }
  return absl::DataLossError(absl::StrCat("slab \"", name(), "\": ", bytes, " bytes at ", offset,
                                          " are not its pages, or belong to two"));
}

Slab::Slab(std::unique_ptr<SharedMemory> memory, uint64_t nonce)
    : memory_(std::move(memory)),
      nonce_(nonce),
      units_((memory_->bytes() - kSlabUnitBytes) / kSlabUnitBytes) {}

absl::StatusOr<int64_t> Slab::Allocate(int64_t bytes) {
  const int64_t units = RoundUp(bytes) / kSlabUnitBytes;
  const std::optional<int64_t> first = units_.Allocate(units);
  if (!first.has_value()) {
    return absl::ResourceExhaustedError(absl::StrCat("host tier: need ", bytes,
                                                     " bytes in one piece, ", free_bytes(),
                                                     " are free of ", total_bytes()));
  }
  const int64_t offset = (*first + 1) * kSlabUnitBytes;  // unit 0 of the object is the header
  const absl::Status committed = CommitUpTo(offset + RoundUp(bytes));
  if (!committed.ok()) {
    units_.Free(*first, units);
    return committed;
  }
  return offset;
}

void Slab::Free(int64_t offset, int64_t bytes) {
  units_.Free(offset / kSlabUnitBytes - 1, RoundUp(bytes) / kSlabUnitBytes);
}

absl::Status Slab::CommitUpTo(int64_t end) {
  if (end <= committed_bytes_) return absl::OkStatus();
  const int64_t step_end =
      std::min(object_bytes(), std::max(end, committed_bytes_ + kCommitStepBytes));
  HW_RETURN_IF_ERROR(memory_->Commit(step_end));
  committed_bytes_ = step_end;
  header().committed_bytes = step_end;
  return absl::OkStatus();
}

}  // namespace heavywater
