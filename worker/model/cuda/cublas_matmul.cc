#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/model/cuda/cublas_library.h"
#include "worker/model/cuda/device_matmul.h"

namespace heavywater {
namespace {

absl::Status CublasStatus(const CublasLibrary& cublas, cublasStatus_t status,
                          const char* expression) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(expression, ": ", cublas.status_string(status));
  if (status == CUBLAS_STATUS_ALLOC_FAILED) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

}  // namespace

// Returns from the enclosing function when a call of cuBLAS's failed, naming it.
#define HW_RETURN_IF_CUBLAS_ERROR(expression) \
  HW_RETURN_IF_ERROR(CublasStatus(cublas_, (expression), #expression))

namespace {

class CublasMatmul final : public DeviceMatmul {
 public:
  explicit CublasMatmul(const CublasLibrary& cublas) : cublas_(cublas) {}
  ~CublasMatmul() override {
    if (handle_ != nullptr) cublas_.destroy(handle_);
  }

  absl::Status Init() {
    HW_RETURN_IF_CUBLAS_ERROR(cublas_.create(&handle_));
    return absl::OkStatus();
  }

  absl::Status Run(const DeviceMatmulArgs& args, std::byte* scratch, cudaStream_t stream) override {
    if (args.tokens == 0 || args.rows == 0) return absl::OkStatus();
    HW_RETURN_IF_ERROR(UseStream(scratch, stream));
    const cudaDataType_t type = args.type == WeightType::kFloat32 ? CUDA_R_32F : CUDA_R_16BF;
    const float one = 1;
    const float zero = 0;
    // Row-major matrices are cuBLAS's column-major ones transposed.
    HW_RETURN_IF_CUBLAS_ERROR(cublas_.gemm_ex(
        handle_, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(args.rows),
        static_cast<int>(args.tokens), static_cast<int>(args.cols), &one, args.weights, type,
        static_cast<int>(args.cols), args.x, type, static_cast<int>(args.cols), &zero, args.out,
        CUDA_R_32F, static_cast<int>(args.out_stride), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    return absl::OkStatus();
  }

 private:
  // Choosing a stream takes cuBLAS's scratch away again.
  absl::Status UseStream(std::byte* scratch, cudaStream_t stream) {
    if (has_stream_ && stream == stream_) return absl::OkStatus();
    HW_RETURN_IF_CUBLAS_ERROR(cublas_.set_stream(handle_, stream));
    HW_RETURN_IF_CUBLAS_ERROR(cublas_.set_workspace(handle_, scratch, kMatmulScratchBytes));
    stream_ = stream;
    has_stream_ = true;
    return absl::OkStatus();
  }

  const CublasLibrary& cublas_;
  cublasHandle_t handle_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool has_stream_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMatmul>> CreateCublasMatmul() {
  HW_ASSIGN_OR_RETURN(const CublasLibrary* const cublas, LoadCublas());
  auto matmul = std::make_unique<CublasMatmul>(*cublas);
  HW_RETURN_IF_ERROR(matmul->Init());
  return matmul;
}

}  // namespace heavywater
