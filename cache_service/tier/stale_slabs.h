// Slabs whose owner was killed keep their memory until somebody removes the
// name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace heavywater {

// Removes the slabs on this node whose name begins with `prefix` and whose owner
// has gone (it held a lock that ends with the process); how many. Processes that
// still map one keep what they have mapped. Slabs that wait for their owner to come
// back (Slab::Keep()) stay.
int RemoveStaleSlabs(const std::string& prefix);

// Slabs of this node that wait for their owner to come back, which no process has open now.
// It may come, or its state_dir may be in no configuration any more: only people know.
struct WaitingSlab {
  std::string name;
  int64_t bytes = 0;
};
std::vector<WaitingSlab> FindWaitingSlabs(const std::string& prefix);

// The one of this name, also where it waits for an owner. `unfinished_too`: also where its
// owner was killed before the header was written; only for a name that no other process
// can be making a slab of right now.
bool RemoveStaleSlab(const std::string& name, bool unfinished_too = false);

}  // namespace heavywater
