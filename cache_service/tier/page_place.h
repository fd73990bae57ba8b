// Where a page lies, as the host tier and the tiers below tell each other.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cache_service/tier/lower_tier.h"
#include "cache_service/tier/page_coding.h"

namespace heavywater {

// Tiers by number: the host is 0, the ones below follow in their order.
inline constexpr int kHostTier = 0;
inline constexpr int kMaxTiers = 8;

// How a page is stored: its own bytes (kOpaque), or coded numbers of that type, and the
// checksum of what is stored.
struct StoredAs {
  PageDtype coding = PageDtype::kOpaque;
  uint32_t crc32c = 0;
};

struct PagePlace {
  PageKey key;
  int tier = kHostTier;
  uint32_t crc32c = 0;  // of a sealed page, as it is stored
  int64_t page_bytes = 0;
  PageDtype coding = PageDtype::kOpaque;  // as it is stored; in the host tier never coded
  PageDtype dtype = PageDtype::kOpaque;   // of its numbers
  PageGeometry geometry = {};
  uint32_t since = 0;  // of ResidenceClock(): in that tier

  int64_t stored_bytes() const {
    return coding == PageDtype::kOpaque ? page_bytes : CodedBytes(geometry, coding);
  }
};

// Whose pages are to move.
struct MoveFilter {
  SequenceId sequence = 0;                           // 0: any
  SequenceId except = 0;                             // but this one
  std::optional<std::string> tenant = std::nullopt;  // any
};

// What became of a page that was copied to another tier.
enum class Relocation {
  kMoved,  // it lies there now
  kKept,   // a rank has come back and may write to it, or has given it up: nothing moves
  kGone,   // its sequence has ended: all that the tier has of it is nobody's
};

}  // namespace heavywater
