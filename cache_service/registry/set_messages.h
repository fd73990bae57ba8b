// A set as one message, or as several in a row where one would be too large.
#pragma once

#include <vector>

#include "heavywater/v1/sequence.pb.h"

namespace heavywater {

// Appends the set to `messages`, cut so that each stays below 1 MiB. Appending
// the lists of the later ones (`continued`) to those of the first gives the set.
void AppendMessages(const v1::SequenceSet& set, std::vector<v1::SequenceSet>* messages);

}  // namespace heavywater
