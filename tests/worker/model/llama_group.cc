#include "tests/worker/model/llama_group.h"

#include <thread>

#include "cache_service/base/status.h"

namespace heavywater {

absl::StatusOr<std::unique_ptr<LlamaGroup>> LlamaGroup::Create(const ModelFile& file, int size,
                                                               const LlamaRunnerOptions& options) {
  auto group = std::make_unique<LlamaGroup>();
  group->comms_ = CreateLocalGroup(size, absl::Seconds(60));
  for (auto& comm : group->comms_) {
    group->backends_.push_back(CreateReferenceBackend());
    HW_ASSIGN_OR_RETURN(auto runner,
                        CpuLlamaRunner::Create(file, *comm, *group->backends_.back(), options));
    group->runners_.push_back(std::move(runner));
  }
  return group;
}

KvShape LlamaGroup::shape(int rank) const {
  const CpuLlamaRunner& runner = *runners_[static_cast<size_t>(rank)];
  return MakeKvShape(runner.config(), runner.shard(), KvShape{});
}

absl::Status LlamaGroup::Run(const std::function<absl::Status(int)>& body) {
  std::vector<absl::Status> results(runners_.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank] { results[static_cast<size_t>(rank)] = body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) HW_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

}  // namespace heavywater
