// cuBLAS, loaded when a runner first needs it and not with the program: its
// thread-local storage (90 KiB) would be in every thread's stack, too much for the
// small stacks of the metrics server, and a worker that serves from CPUs would not
// start without it.
#pragma once

#include <cublas_v2.h>

#include "absl/status/statusor.h"

namespace heavywater {

// Of one name with a template of cuBLAS's C++ header.
using CublasGemmEx = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int,
                                        int, int, const void*, const void*, cudaDataType, int,
                                        const void*, cudaDataType, int, const void*, void*,
                                        cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);

struct CublasLibrary {
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  CublasGemmEx gemm_ex = nullptr;
  decltype(&cublasGetStatusString) status_string = nullptr;
};

// The process's one copy, never unloaded; thread safe. FAILED_PRECONDITION naming
// the library or function that is missing.
absl::StatusOr<const CublasLibrary*> LoadCublas();

}  // namespace heavywater
