#include "tests/worker/model/cuda/plain_matmul.h"

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/check.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/backend/cuda/launch.h"

namespace heavywater {
namespace {

constexpr int kThreads = 32;

double At(WeightType type, const void* data, int64_t i) {
  if (type == WeightType::kFloat32) return static_cast<const float*>(data)[i];
  return BFloat16ToFloat(static_cast<const uint16_t*>(data)[i]);
}

// A thread for every kThreads-th result.
void Multiply(DeviceMatmulArgs args) {
  for (int64_t i = threadIdx.x; i < args.tokens * args.rows; i += kThreads) {
    const int64_t token = i / args.rows;
    const int64_t row = i % args.rows;
    double sum = 0;
    for (int64_t c = 0; c < args.cols; ++c) {
      sum += At(args.type, args.weights, row * args.cols + c) *
             At(args.type, args.x, token * args.cols + c);
    }
    args.out[token * args.out_stride + row] = static_cast<float>(sum);
  }
}

class PlainMatmul final : public DeviceMatmul {
 public:
  absl::Status Run(const DeviceMatmulArgs& args, std::byte* scratch, cudaStream_t stream) override {
    HW_CHECK(scratch != nullptr && args.out_stride >= args.rows && args.cols > 0);
    return HW_CUDA_STATUS(
        cuda::Launch(Multiply, dim3(1), dim3(kThreads), /*shared_bytes=*/0, stream, args));
  }
};

}  // namespace

std::unique_ptr<DeviceMatmul> CreatePlainMatmul() { return std::make_unique<PlainMatmul>(); }

}  // namespace heavywater
