// What the `tier` benchmark times: one page at a time, through one tier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/lower_tier.h"

namespace heavywater {

// Bytes that do not repeat, one page after another; the same for the same seed.
std::vector<std::byte> BenchBytes(int64_t bytes, uint32_t seed);

// A host tier with one sequence of `pages` pages of `bytes` each: a page is reserved before it is
// timed, as ranks do, and rows go in and out through Write() and Read().
class HostTierCase {
 public:
  // `sealed`: pages are committed, so that putting one computes its checksum and getting
  // it checks that; else nothing is checked. They lie one after the other in one head, those
  // that stay open in a head each.
  static absl::StatusOr<std::unique_ptr<HostTierCase>> Create(int64_t bytes, int pages,
                                                              bool sealed);

  // All but the last row of a page that is not sealed: the page stays open.
  int64_t bytes() const;
  absl::Status Put(int page, std::span<const std::byte> bytes);
  // Between the last Put() and Get(): what makes written rows readable.
  absl::Status MakeReadable();
  absl::Status Get(int page, std::span<std::byte> bytes);
  // Where the page lies, to flush it from caches.
  std::span<std::byte> Memory(int page);

 private:
  HostTierCase(std::unique_ptr<Slab> slab, const PageGeometry& geometry, bool sealed);
  RowRange RowsOf(int page) const;

  Slab* const slab_;
  HostPageStore store_;
  const PageGeometry geometry_;
  const bool sealed_;
  std::vector<int64_t> offsets_;
};

}  // namespace heavywater
