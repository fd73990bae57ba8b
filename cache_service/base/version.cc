#include "cache_service/base/version.h"

namespace heavywater {

// Defined for this source alone: a build of another version compiles nothing else anew.
const char* const kVersion = HEAVYWATER_VERSION;

}  // namespace heavywater
