#include "tests/bench/tier_case.h"

#include <random>
#include <utility>

#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr int kRowBytes = 512;  // K and V at head size 128 in 16 bits

constexpr SequenceId kSequence = 1;

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
                                 .num_kv_heads = sealed ? 1 : pages,
                                 .page_tokens = static_cast<int>(bytes / kRowBytes),
                                 .row_bytes = kRowBytes};
  HW_ASSIGN_OR_RETURN(auto slab, Slab::Create("", (bytes + kSlabUnitBytes) * (pages + 1)));
  std::unique_ptr<HostTierCase> host(new HostTierCase(std::move(slab), geometry, sealed));
  const int pages_of_head = sealed ? pages : 1;
  HW_RETURN_IF_ERROR(
      host->store_.Open({.sequence = kSequence,
                         .geometry = geometry,
                         .max_tokens = int64_t{pages_of_head} * geometry.page_tokens}));
  HW_ASSIGN_OR_RETURN(
      Reservation reservation,
      host->store_.Reserve(
          {.sequence = kSequence, .heads = {0, geometry.num_kv_heads}, .num_pages = pages_of_head},
          /*direct=*/false));
  host->offsets_ = std::move(reservation.offsets);
  return host;
}

RowRange HostTierCase::RowsOf(int page) const {
  return {.sequence = kSequence,
          .kv_head = sealed_ ? 0 : page,
          .first_position = sealed_ ? int64_t{page} * geometry_.page_tokens : 0,
          .num_positions = bytes() / kRowBytes};
}

int64_t HostTierCase::bytes() const {
  return geometry_.page_bytes() - (sealed_ ? 0 : geometry_.row_bytes);
}

absl::Status HostTierCase::Put(int page, std::span<const std::byte> bytes) {
  const RowRange rows = RowsOf(page);
  HW_RETURN_IF_ERROR(store_.Write(0, rows, bytes));
  if (!sealed_) return absl::OkStatus();
  return store_.Commit(kSequence, 0, rows.first_position + rows.num_positions);
}

absl::Status HostTierCase::MakeReadable() {
  if (sealed_) return absl::OkStatus();
  return store_.Commit(kSequence, 0, RowsOf(0).num_positions);
}

absl::Status HostTierCase::Get(int page, std::span<std::byte> bytes) {
  return store_.Read(RowsOf(page), bytes);
}

std::span<std::byte> HostTierCase::Memory(int page) {
  return {slab_->At(offsets_.at(page)), static_cast<size_t>(geometry_.page_bytes())};
}

}  // namespace heavywater
