// Whether anybody listens at an address.
#pragma once

#include <string>

#include "absl/time/time.h"

namespace heavywater {

// HOST:PORT over TCP, of any of the host's addresses; false after `limit` at the latest. (Names
// are looked up first, which may take longer.)
bool Listens(const std::string& address, absl::Duration limit);

}  // namespace heavywater
