// Stored tensors to float32.
#pragma once

#include <cstdint>
#include <span>

#include "worker/model/gguf_types.h"

namespace heavywater {

// IEEE half precision, stored in 16 bits, to float32; exact.
float HalfToFloat(uint16_t half);

// Rows [first_row, first_row + num_rows) of the tensor; out is
// [num_rows][tensor.row_elements]. The range must lie inside the tensor.
void DequantizeRows(const GgufTensor& tensor, int64_t first_row, int64_t num_rows,
                    std::span<float> out);

}  // namespace heavywater
