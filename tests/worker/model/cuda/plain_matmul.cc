#include "tests/worker/model/cuda/plain_matmul.h"

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/check.h"
#include "worker/backend/cuda/cuda_check.h"

namespace heavywater {
namespace {

class PlainMatmul final : public DeviceMatmul {
 public:
  absl::Status Run(const DeviceMatmulArgs& args, std::byte* scratch, cudaStream_t stream) override {
    HW_CHECK(scratch != nullptr && args.out_stride >= args.rows && args.cols > 0);
    HW_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
    for (int64_t t = 0; t < args.tokens; ++t) {
      for (int64_t r = 0; r < args.rows; ++r) {
        double sum = 0;
        for (int64_t c = 0; c < args.cols; ++c) {
          sum += At(args.type, args.weights, r * args.cols + c) *
                 At(args.type, args.x, t * args.cols + c);
        }
        args.out[t * args.out_stride + r] = static_cast<float>(sum);
      }
    }
    return absl::OkStatus();
  }

 private:
  static double At(WeightType type, const void* data, int64_t i) {
    if (type == WeightType::kFloat32) return static_cast<const float*>(data)[i];
    return BFloat16ToFloat(static_cast<const uint16_t*>(data)[i]);
  }
};

}  // namespace

std::unique_ptr<DeviceMatmul> CreatePlainMatmul() { return std::make_unique<PlainMatmul>(); }

}  // namespace heavywater
