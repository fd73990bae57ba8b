// The version that every binary prints with --version and every server reports.
#pragma once

namespace heavywater {

#ifdef HEAVYWATER_VERSION
inline constexpr char kVersion[] = HEAVYWATER_VERSION;
#else
inline constexpr char kVersion[] = "unknown";
#endif

}  // namespace heavywater
