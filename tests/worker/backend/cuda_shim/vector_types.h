// CUDA's built-in vector types and dim3.
#pragma once

#include <cstdint>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)  // NOLINT: implicit, as CUDA's
      : x(x), y(y), z(z) {}
};

#define HW_SHIM_VECTORS(name, type)                                              \
  struct alignas(2 * sizeof(type)) name##2 {                                     \
    type x, y;                                                                   \
  };                                                                             \
  struct name##3 {                                                               \
    type x, y, z;                                                                \
  };                                                                             \
  struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4 {        \
    type x, y, z, w;                                                             \
  };                                                                             \
  constexpr name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  constexpr name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  constexpr name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

HW_SHIM_VECTORS(char, signed char)
HW_SHIM_VECTORS(uchar, unsigned char)
HW_SHIM_VECTORS(short, short)            // NOLINT(google-runtime-int)
HW_SHIM_VECTORS(ushort, unsigned short)  // NOLINT(google-runtime-int)
HW_SHIM_VECTORS(int, int)
HW_SHIM_VECTORS(float, float)
HW_SHIM_VECTORS(double, double)
HW_SHIM_VECTORS(longlong, long long)            // NOLINT(google-runtime-int)
HW_SHIM_VECTORS(ulonglong, unsigned long long)  // NOLINT(google-runtime-int)
#undef HW_SHIM_VECTORS

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
constexpr uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
constexpr uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
constexpr uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
