#include "worker/backend/cuda/sketches.h"

namespace heavywater::cuda {

absl::Status CudaSketches::ObserveQueries(const KvShape& shape, const ObserveQueriesParams& params,
                                          cudaStream_t stream) {
  return absl::UnimplementedError("ObserveQueries");
}
absl::Status CudaSketches::ChooseChannels(const KvShape& shape, const ChooseChannelsParams& params,
                                          cudaStream_t stream) {
  return absl::UnimplementedError("ChooseChannels");
}
absl::Status CudaSketches::EncodePages(const KvShape& shape, const EncodePagesParams& params,
                                       cudaStream_t stream) {
  return absl::UnimplementedError("EncodePages");
}

}  // namespace heavywater::cuda
