// The version that every binary prints with --version and every server reports.
#pragma once

namespace heavywater {

extern const char* const kVersion;

}  // namespace heavywater
