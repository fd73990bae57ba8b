// How many sequences hold each page that more than one has held: its memory is free when the
// last one lets go of it.
#pragma once

#include <cstdint>

#include "absl/container/flat_hash_map.h"

namespace heavywater {

// Pages by their offset in the slab; others have one holder and are not here. Not thread safe.
class PageHolders {
 public:
  // One more sequence holds the page, whose checksum is `crc`. False: it is another page.
  bool Add(int64_t offset, uint32_t crc);
  // One lets go of it. True when nobody holds it any more.
  bool Drop(int64_t offset);

  int64_t Holders(int64_t offset) const;  // 0: it is not here
  int64_t num_pages() const { return static_cast<int64_t>(pages_.size()); }
  int64_t num_shared() const { return num_shared_; }  // held by two or more

 private:
  struct Page {
    int32_t holders = 0;
    uint32_t crc = 0;
  };
  absl::flat_hash_map<int64_t, Page> pages_;
  int64_t num_shared_ = 0;
};

}  // namespace heavywater
