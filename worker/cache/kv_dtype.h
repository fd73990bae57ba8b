// The number type of K and V by name alone: for kernels, which include little.
#pragma once

namespace heavywater {

enum class KvDtype { kFloat32, kBFloat16, kFloat16 };
inline constexpr KvDtype kKvDtypes[] = {KvDtype::kFloat32, KvDtype::kBFloat16, KvDtype::kFloat16};

constexpr int ElementBytes(KvDtype dtype) { return dtype == KvDtype::kFloat32 ? 4 : 2; }

}  // namespace heavywater
