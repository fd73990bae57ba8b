#include "tests/bench/tier_case.h"

#include <random>
#include <utility>

#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr int kRowBytes = 512;  // K and V at head size 128 in 16 bits

// Each page is a sequence: one that is not full stays open, whatever becomes of others.
SequenceId SequenceOf(int page) { return static_cast<SequenceId>(page) + 1; }

}  // namespace

std::vector<std::byte> BenchBytes(int64_t bytes, uint32_t seed) {
  std::vector<std::byte> all(static_cast<size_t>(bytes));
  std::minstd_rand random(seed + 1);
  for (std::byte& byte : all) byte = static_cast<std::byte>(random() >> 8);
  return all;
}

HostTierCase::HostTierCase(std::unique_ptr<Slab> slab, const PageGeometry& geometry, bool sealed)
    : slab_(slab.get()), store_(std::move(slab)), geometry_(geometry), sealed_(sealed) {}

absl::StatusOr<std::unique_ptr<HostTierCase>> HostTierCase::Create(int64_t bytes, int pages,
                                                                   bool sealed) {
  const PageGeometry geometry = {.num_layers = 1,
                                 .num_kv_heads = 1,
                                 .page_tokens = static_cast<int>(bytes / kRowBytes),
                                 .row_bytes = kRowBytes};
  HW_ASSIGN_OR_RETURN(auto slab, Slab::Create("", (bytes + kSlabUnitBytes) * pages));
  std::unique_ptr<HostTierCase> host(new HostTierCase(std::move(slab), geometry, sealed));
  for (int page = 0; page < pages; ++page) {
    const SequenceId sequence = SequenceOf(page);
    HW_RETURN_IF_ERROR(host->store_.Open(
        {.sequence = sequence, .geometry = geometry, .max_tokens = geometry.page_tokens}));
    HW_ASSIGN_OR_RETURN(
        const Reservation reservation,
        host->store_.Reserve({.sequence = sequence, .heads = {0, 1}, .num_pages = 1},
                             /*direct=*/false));
    host->offsets_.push_back(reservation.offsets.at(0));
  }
  return host;
}

int64_t HostTierCase::bytes() const {
  return geometry_.page_bytes() - (sealed_ ? 0 : geometry_.row_bytes);
}

absl::Status HostTierCase::Put(int page, std::span<const std::byte> bytes) {
  const RowRange rows = {.sequence = SequenceOf(page),
                         .num_positions = static_cast<int64_t>(bytes.size()) / kRowBytes};
  HW_RETURN_IF_ERROR(store_.Write(0, rows, bytes));
  if (!sealed_) return absl::OkStatus();
  return store_.Commit(rows.sequence, 0, rows.num_positions);
}

absl::Status HostTierCase::MakeReadable(int page) {
  if (sealed_) return absl::OkStatus();
  return store_.Commit(SequenceOf(page), 0, bytes() / geometry_.row_bytes);
}

absl::Status HostTierCase::Get(int page, std::span<std::byte> bytes) {
  return store_.Read({.sequence = SequenceOf(page),
                      .num_positions = static_cast<int64_t>(bytes.size()) / kRowBytes},
                     bytes);
}

std::span<std::byte> HostTierCase::Memory(int page) {
  return {slab_->At(offsets_.at(page)), static_cast<size_t>(geometry_.page_bytes())};
}

}  // namespace heavywater
