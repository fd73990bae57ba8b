// Reads memory and does nothing else: what a device can do at best.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace heavywater {

// `bytes`: a multiple of 16. `sink` is written only if the memory holds one certain
// sum, so that the reads stay.
cudaError_t LaunchRead(const std::byte* memory, int64_t bytes, uint32_t* sink, cudaStream_t stream);

}  // namespace heavywater
