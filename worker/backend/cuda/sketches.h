// Sketches of CudaBackend: made on the device from host pages, which it reads in place.
#pragma once

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/context.h"

namespace heavywater::cuda {

class CudaSketches {
 public:
  explicit CudaSketches(CudaContext& context) : context_(context) {}

  // As Backend's operations of these names, within an operation of `context`.
  absl::Status ObserveQueries(const KvShape& shape, const ObserveQueriesParams& params,
                              cudaStream_t stream);
  absl::Status ChooseChannels(const KvShape& shape, const ChooseChannelsParams& params,
                              cudaStream_t stream);
  absl::Status EncodePages(const KvShape& shape, const EncodePagesParams& params,
                           cudaStream_t stream);

 private:
  CudaContext& context_;
};

}  // namespace heavywater::cuda
