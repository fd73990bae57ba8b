// What recall has done for one sequence, on one rank.
#pragma once

#include <cstdint>

namespace heavywater {

struct RecallStats {
  int64_t queries = 0;       // tokens x KV heads x layers that could pick
  int64_t reads = 0;         // positions picked by them
  int64_t reads_max = 0;     // by one token, KV head and layer
  int64_t promoted = 0;      // positions that got a slot again, over layers and sets
  double mass_missing = 0;   // estimated share of attention that was not read, last sample:
                             // mean over tokens, KV heads and layers
  int64_t sketch_bytes = 0;  // on the device now

  // Host pages of this rank, of one layer and KV head each; all 0 where none may rest.
  int64_t pages_resting = 0;  // now
  int64_t pages_rested = 0;   // so far, like the next three
  int64_t pages_asked = 0;
  int64_t pages_returned = 0;
  int64_t pages_lost = 0;      // of those asked for
  int64_t missed_picks = 0;    // picks that fell on pages which rested, and were not read
  int64_t waits_given_up = 0;  // for pages that had not come in time (RecallOptions::wait)
};

}  // namespace heavywater
