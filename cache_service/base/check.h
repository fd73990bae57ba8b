// HW_CHECK: our own code is wrong if this fails; the process ends with the
// failed expression. What the world can cause is an absl::Status instead.
#pragma once

#include <cstdio>
#include <cstdlib>

#define HW_CHECK(condition)                                                              \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)
