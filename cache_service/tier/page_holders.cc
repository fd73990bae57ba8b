#include "cache_service/tier/page_holders.h"

namespace heavywater {

bool PageHolders::Add(int64_t offset, uint32_t crc) {
  const auto [found, added] = pages_.try_emplace(offset);
  Page& page = found->second;
  if (!added && page.crc != crc) return false;
  page.crc = crc;
  if (++page.holders == 2) ++num_shared_;
  return true;
}

bool PageHolders::Drop(int64_t offset) {
  const auto found = pages_.find(offset);
  if (found == pages_.end()) return true;
  const int32_t left = --found->second.holders;
  if (left == 1) --num_shared_;
  if (left > 0) return false;
  pages_.erase(found);
  return true;
}

int64_t PageHolders::Holders(int64_t offset) const {
  const auto found = pages_.find(offset);
  return found == pages_.end() ? 0 : found->second.holders;
}

}  // namespace heavywater
