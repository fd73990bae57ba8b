// What depends on whether this binary was built with CUDA and with NCCL. Without
// them everything here is FAILED_PRECONDITION and says so.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"
#include "worker/comm/nccl/nccl_options.h"
#include "worker/model/llama_runner.h"
#include "worker/model/model_file.h"

namespace heavywater {

// The backend of GPU number `device`. FAILED_PRECONDITION without driver or GPU,
// INVALID_ARGUMENT naming how many there are when it is not one of them.
absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(int device);

// The GPU's UUID. The same errors.
absl::StatusOr<std::string> GpuIdentity(int device);

struct GpuRunnerOptions {
  int device = 0;              // the backend's
  int max_batch_tokens = 512;  // as CudaLlamaOptions
  std::string weights_dtype = "bf16";
};
// A CudaLlamaRunner over cuBLAS.
absl::StatusOr<std::unique_ptr<LlamaRunner>> CreateGpuRunner(const ModelFile& file,
                                                             Communicator& communicator,
                                                             Backend& backend,
                                                             const GpuRunnerOptions& options);

// CreateNcclCommunicator().
absl::StatusOr<std::unique_ptr<Communicator>> ConnectGpus(const NcclOptions& options,
                                                          RendezvousStore& store);

}  // namespace heavywater
