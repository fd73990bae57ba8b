// Whether ranks could listen where they are told to, asked before any other rank
// depends on it: Gloo leaks memory when it cannot use an address, and does not name it.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace heavywater {

// `interface` (by its name, where it is not empty) or else `listen_address` (a host name or
// an IP, no port) is this machine's: UNAVAILABLE naming it, and the interfaces that there
// are.
absl::Status CheckListens(const std::string& listen_address, const std::string& interface);

}  // namespace heavywater
