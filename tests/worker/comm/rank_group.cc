#include "tests/worker/comm/rank_group.h"

#include <iostream>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "worker/comm/nccl/nccl_options.h"
#include "worker/comm/rendezvous.h"
#include "worker/comm/staged/staged_communicator.h"

namespace heavywater {

std::string GroupParamName(const GroupParam& param) {
  std::string name = param.kind == CommKind::kStaged ? "staged" : KindName(param.kind);
  name[0] = absl::ascii_toupper(name[0]);
  return absl::StrCat(name, param.size);
}

std::string KindName(CommKind kind) {
  switch (kind) {
    case CommKind::kLocal:
      return "local";
    case CommKind::kGloo:
      return "gloo";
    case CommKind::kNccl:
      return "nccl";
    case CommKind::kStaged:
      return "gloo-staged";
  }
  return "unknown";
}

namespace {

absl::StatusOr<std::unique_ptr<Communicator>> Connect(const GroupParam& param,
                                                      const GlooOptions& options,
                                                      RendezvousStore& store) {
  if (param.kind != CommKind::kNccl) return CreateGlooCommunicator(options, store);
  return CreateNcclCommunicator({.rank = options.rank,
                                 .size = options.size,
                                 .device = options.rank,
                                 .listen_address = options.listen_address,
                                 .timeout = options.timeout,
                                 .key_prefix = options.key_prefix},
                                store);
}

}  // namespace

void RunOnThreads(int count, const std::function<void(int index)>& body) {
  std::vector<std::thread> threads;
  for (int index = 0; index < count; ++index) threads.emplace_back(body, index);
  for (std::thread& thread : threads) thread.join();
}

RankGroup::RankGroup(const GroupParam& param, absl::Duration timeout,
                     const std::vector<std::string>& addresses) {
  if (param.kind == CommKind::kLocal) {
    ranks_ = CreateLocalGroup(param.size, timeout);
    return;
  }
  ranks_.resize(param.size);
  backends_.resize(param.size);
  InProcessRendezvous store;
  RunOnThreads(param.size, [&](int rank) {
    GlooOptions options{.rank = rank, .size = param.size, .timeout = timeout, .key_prefix = "t"};
    if (!addresses.empty()) options.listen_address = addresses[rank];
    auto comm = Connect(param, options, store);
    if (!comm.ok()) std::cerr << "rank " << rank << ": " << comm.status() << std::endl;
    HW_CHECK(comm.ok());
    ranks_[rank] = *std::move(comm);
    if (param.kind != CommKind::kStaged) return;
    backends_[rank] = CreateReferenceBackend();
    ranks_[rank] = std::make_unique<StagedCommunicator>(std::move(ranks_[rank]), *backends_[rank]);
  });
}

// Together, as ranks that end do: leaving waits for the others.
RankGroup::~RankGroup() {
  RunOnThreads(static_cast<int>(ranks_.size()), [&](int rank) { Destroy(rank); });
}

std::vector<absl::Status> RankGroup::Run(const Body& body) {
  std::vector<absl::Status> statuses(ranks_.size());
  RunOnThreads(static_cast<int>(ranks_.size()),
               [&](int rank) { statuses[rank] = body(rank, *ranks_[rank]); });
  return statuses;
}

}  // namespace heavywater
