// The number types in which K and V are stored, and what turns floats into them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/float16.h"
#include "worker/cache/kv_dtype.h"

namespace heavywater {

// Types of their own, so that no kernel takes one for the other.
struct BFloat16 {
  uint16_t bits = 0;
};
struct Float16 {
  uint16_t bits = 0;
};

inline float ToFloat(float value) { return value; }
inline float ToFloat(BFloat16 value) { return BFloat16ToFloat(value.bits); }
inline float ToFloat(Float16 value) { return Float16ToFloat(value.bits); }

// To the nearest; fp16 holds no more than +-65504.
inline void FromFloat(float value, float& to) { to = value; }
inline void FromFloat(float value, BFloat16& to) { to.bits = FloatToBFloat16(value); }
inline void FromFloat(float value, Float16& to) { to.bits = FloatToFloat16(value); }

// body(std::type_identity<T>()) for the dtype's T.
template <class Body>
decltype(auto) WithKvElement(KvDtype dtype, const Body& body) {
  switch (dtype) {
    case KvDtype::kFloat32:
      return body(std::type_identity<float>());
    case KvDtype::kFloat16:
      return body(std::type_identity<Float16>());
    case KvDtype::kBFloat16:
      break;
  }
  return body(std::type_identity<BFloat16>());
}

// `to` has room for from.size() elements; it need not be aligned.
inline void StoreKvRow(KvDtype dtype, std::span<const float> from, std::byte* to) {
  WithKvElement(dtype, [&]<typename T>(std::type_identity<T>) {
    for (size_t i = 0; i < from.size(); ++i) {
      T element;
      FromFloat(from[i], element);
      std::memcpy(to + i * sizeof(T), &element, sizeof(T));
    }
  });
}
inline void LoadKvRow(KvDtype dtype, const std::byte* from, std::span<float> to) {
  WithKvElement(dtype, [&]<typename T>(std::type_identity<T>) {
    for (size_t i = 0; i < to.size(); ++i) {
      T element;
      std::memcpy(&element, from + i * sizeof(T), sizeof(T));
      to[i] = ToFloat(element);
    }
  });
}

}  // namespace heavywater
