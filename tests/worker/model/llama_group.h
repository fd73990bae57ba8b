// Runs a tensor-parallel model with one thread per rank.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"
#include "worker/model/cpu_llama_runner.h"
#include "worker/model/model_file.h"

namespace heavywater {

// The ranks of one model, each with a communicator and a backend of its own.
class LlamaGroup {
 public:
  static absl::StatusOr<std::unique_ptr<LlamaGroup>> Create(const ModelFile& file, int size,
                                                            const LlamaRunnerOptions& options);

  int size() const { return static_cast<int>(runners_.size()); }
  CpuLlamaRunner& runner(int rank) { return *runners_[static_cast<size_t>(rank)]; }
  Backend& backend(int rank) { return *backends_[static_cast<size_t>(rank)]; }
  KvShape shape(int rank) const;

  // body(rank) on a thread for each rank; the first rank's error that is one.
  absl::Status Run(const std::function<absl::Status(int)>& body);

 private:
  std::vector<std::unique_ptr<Communicator>> comms_;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<std::unique_ptr<CpuLlamaRunner>> runners_;
};

}  // namespace heavywater
