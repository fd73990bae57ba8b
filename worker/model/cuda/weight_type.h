// The type of weights on a GPU. For kernels, too: includes nothing.
#pragma once

#include <cstdint>

namespace heavywater {

// Of the weights' matrices on the device, and of the rows they are multiplied with.
// Norms, sums and results are always float32.
enum class WeightType { kFloat32, kBFloat16 };

constexpr int64_t BytesOf(WeightType type) { return type == WeightType::kFloat32 ? 4 : 2; }

}  // namespace heavywater
