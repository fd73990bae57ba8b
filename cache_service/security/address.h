// What an address says before anything connects to it.
#pragma once

#include <string>

namespace heavywater {

// Whether HOST:PORT (or HOST) can only be reached from this machine: 127.0.0.0/8, ::1,
// "localhost". Other names are not looked up: what they resolve to may change.
bool IsLoopback(const std::string& address);

// "[::1]:7700" -> "::1", "cache:7700" -> "cache".
std::string HostOf(const std::string& address);

}  // namespace heavywater
