// One layer on the CUDA backend and rows to append to it.
#pragma once

#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "tests/worker/backend/cuda/shim_test_base.h"
#include "tests/worker/backend/layer_image.h"
#include "tests/worker/backend/test_memory.h"
#include "worker/backend/cuda/cuda_backend.h"

namespace heavywater::cuda {

class SlotsTest : public ShimTest {
 protected:
  static KvShape Shape(int num_kv_heads, int head_dim, KvDtype dtype) {
    KvShape shape;
    shape.num_query_heads = num_kv_heads;
    shape.num_kv_heads = num_kv_heads;
    shape.head_dim = head_dim;
    shape.dtype = dtype;
    return shape;
  }

  // Rows in which every channel is `value`; any stream may read them.
  DeviceBuffer Rows(const KvShape& shape, int64_t tokens, float value) {
    DeviceBuffer rows =
        Upload(backend(), std::vector<float>(tokens * shape.num_kv_heads * shape.head_dim, value));
    Stream stream;
    EXPECT_TRUE(backend().Synchronize(stream).ok());
    return rows;
  }

  // Tokens from position `slot` on into as many slots from there; their host rows from
  // `host` on where it is given.
  void Append(const KvShape& shape, const LayerView& layer, int64_t tokens, int32_t slot,
              float value, std::byte* host, Stream& stream) {
    Append(shape, layer, tokens, slot, Rows(shape, tokens, value), host, stream);
  }
  void Append(const KvShape& shape, const LayerView& layer, int64_t tokens, int32_t slot,
              DeviceBuffer rows, std::byte* host, Stream& stream) {
    rows_.push_back(std::move(rows));
    std::vector<int32_t> slots(tokens);
    std::iota(slots.begin(), slots.end(), slot);
    std::vector<HostRow> host_rows;
    for (int64_t row = 0; host != nullptr && row < tokens * shape.num_kv_heads; ++row) {
      host_rows.push_back({.row = host + row * shape.row_bytes()});
    }
    const AppendItem item{.layer = layer,
                          .first_token = 0,
                          .num_tokens = tokens,
                          .first_position = slot,
                          .slots = slots};
    ASSERT_TRUE(backend()
                    .Append(shape,
                            {.items = {&item, 1},
                             .keys = rows_.back().As<float>(),
                             .values = rows_.back().As<float>(),
                             .host_rows = host_rows},
                            stream)
                    .ok());
  }

  Backend& backend() { return *backend_; }

 private:
  std::unique_ptr<Backend> backend_ = CreateCudaBackend({}).value();
  std::vector<DeviceBuffer> rows_;
};

}  // namespace heavywater::cuda
