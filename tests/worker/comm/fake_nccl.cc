#include "tests/worker/comm/fake_nccl.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cache_service/base/check.h"
#include "cache_service/base/mutex.h"
#include "tests/worker/comm/fake_stream.h"

namespace heavywater::fake_nccl {
namespace {

struct Work {
  bool gather = false;
  ncclDataType_t type = ncclFloat32;
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;
  std::shared_ptr<StreamTicket> ticket = nullptr;
};

size_t SizeOf(ncclDataType_t type) { return type == ncclInt64 ? 8 : 4; }
size_t Bytes(const Work& work) { return work.count * SizeOf(work.type); }

template <typename T>
void SumBackwards(const std::vector<Work>& works) {
  std::vector<T> sum(works[0].count);
  for (auto work = works.rbegin(); work != works.rend(); ++work) {
    const T* const term = static_cast<const T*>(work->from);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += term[i];
  }
  for (const Work& work : works) std::copy(sum.begin(), sum.end(), static_cast<T*>(work.to));
}

void Gather(const std::vector<Work>& works) {
  std::vector<char> all;
  for (const Work& work : works) {
    const char* const from = static_cast<const char*>(work.from);
    all.insert(all.end(), from, from + Bytes(work));
  }
  for (const Work& work : works) std::copy(all.begin(), all.end(), static_cast<char*>(work.to));
}

// One collective, with every rank's part: works[i] is rank i's.
void RunCollective(const std::vector<Work>& works) {
  const auto alike = [&](const Work& work) {
    return work.gather == works[0].gather && work.type == works[0].type &&
           work.count == works[0].count;
  };
  if (!std::all_of(works.begin(), works.end(), alike)) {
    for (const Work& work : works) std::memset(work.to, 0xff, Bytes(work));
  } else if (works[0].gather) {
    Gather(works);
  } else if (works[0].type == ncclInt64) {
    SumBackwards<uint64_t>(works);
  } else {
    SumBackwards<float>(works);
  }
}

// The ranks that share an id.
struct Group {
  int joined = 0;
  std::vector<std::deque<Work>> queues;  // [rank], what has not run
};

struct State {
  Mutex mutex;
  CondVar changed;
  std::map<std::string, std::shared_ptr<Group>> groups;
  uint64_t num_ids = 0;
  ncclResult_t id_result = ncclSuccess;
  std::set<int> held;
  std::set<int> hung;
  std::map<int, ncclResult_t> errors;
  int alive = 0;
  int destroyed = 0;
  int aborted = 0;
  int queued = 0;
};

State& TheState() {
  static State& state = *new State;
  return state;
}

thread_local int t_version = NCCL_VERSION_CODE;

}  // namespace
}  // namespace heavywater::fake_nccl

// The type that NCCL declares and does not show.
struct ncclComm {
  std::shared_ptr<heavywater::fake_nccl::Group> group;
  int rank = 0;
  int size = 0;
  bool closing = false;
  std::thread runner{};  // rank 0's runs the group's collectives; others have none
};

namespace heavywater::fake_nccl {
namespace {

bool Ready(const Group& group) {
  if (group.joined < static_cast<int>(group.queues.size())) return false;
  for (int rank = 0; rank < static_cast<int>(group.queues.size()); ++rank) {
    if (group.queues[rank].empty() || TheState().hung.contains(rank)) return false;
  }
  return true;
}

// Runs what all ranks have queued, until rank 0's communicator ends.
void RunGroup(ncclComm* comm) {
  State& state = TheState();
  MutexLock lock(&state.mutex);
  while (!comm->closing) {
    if (!Ready(*comm->group)) {
      state.changed.Wait(&state.mutex);
      continue;
    }
    std::vector<Work> works;
    for (std::deque<Work>& queue : comm->group->queues) {
      works.push_back(queue.front());
      queue.pop_front();
    }
    RunCollective(works);
    for (const Work& work : works) work.ticket->Finish();
    state.changed.SignalAll();
  }
}

ncclResult_t Queue(ncclComm_t comm, Work work) {
  State& state = TheState();
  MutexLock lock(&state.mutex);
  HW_CHECK(comm->group->joined == comm->size);
  work.ticket = NewTicketOfThisThread();
  comm->group->queues[comm->rank].push_back(work);
  ++state.queued;
  state.changed.SignalAll();
  return ncclSuccess;
}

// Ends a communicator; what it has queued counts as finished, its peers' stays.
void Close(ncclComm_t comm, int State::*count) {
  State& state = TheState();
  {
    MutexLock lock(&state.mutex);
    comm->closing = true;
    std::deque<Work>& queue = comm->group->queues[comm->rank];
    for (const Work& work : queue) work.ticket->Finish();
    queue.clear();
    ++(state.*count);
    --state.alive;
    state.changed.SignalAll();
  }
  if (comm->runner.joinable()) comm->runner.join();
  delete comm;
}

}  // namespace

void Reset() {
  State& state = TheState();
  MutexLock lock(&state.mutex);
  HW_CHECK(state.alive == 0);
  state.id_result = ncclSuccess;
  state.held.clear();
  state.hung.clear();
  state.errors.clear();
  state.groups.clear();
  state.destroyed = state.aborted = state.queued = 0;
}

void SetVersionOfThisThread(int version) { t_version = version; }

void SetUniqueIdResult(ncclResult_t result) {
  MutexLock lock(&TheState().mutex);
  TheState().id_result = result;
}

void HoldInit(int rank) {
  MutexLock lock(&TheState().mutex);
  TheState().held.insert(rank);
}

void Hang(int rank) {
  MutexLock lock(&TheState().mutex);
  TheState().hung.insert(rank);
}

void SetAsyncError(int rank, ncclResult_t result) {
  MutexLock lock(&TheState().mutex);
  TheState().errors[rank] = result;
}

int NumDestroyed() {
  MutexLock lock(&TheState().mutex);
  return TheState().destroyed;
}

int NumAborted() {
  MutexLock lock(&TheState().mutex);
  return TheState().aborted;
}

int NumAlive() {
  MutexLock lock(&TheState().mutex);
  return TheState().alive;
}

int NumQueued() {
  MutexLock lock(&TheState().mutex);
  return TheState().queued;
}

}  // namespace heavywater::fake_nccl

using heavywater::MutexLock;
using heavywater::fake_nccl::Close;
using heavywater::fake_nccl::Group;
using heavywater::fake_nccl::Queue;
using heavywater::fake_nccl::RunGroup;
using heavywater::fake_nccl::State;
using heavywater::fake_nccl::TheState;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = heavywater::fake_nccl::t_version;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  State& state = TheState();
  MutexLock lock(&state.mutex);
  std::memset(id->internal, 0, sizeof(id->internal));
  // Bytes of all kinds, as a real id has.
  id->internal[1] = '\n';
  id->internal[2] = static_cast<char>(0xff);
  const uint64_t number = ++state.num_ids;
  std::memcpy(id->internal + 8, &number, sizeof(number));
  return state.id_result;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  HW_CHECK(config->blocking == 0);
  State& state = TheState();
  MutexLock lock(&state.mutex);
  std::shared_ptr<Group>& group = state.groups[std::string(id.internal, sizeof(id.internal))];
  if (group == nullptr) group = std::make_shared<Group>();
  group->queues.resize(nranks);
  *comm = new ncclComm{.group = group, .rank = rank, .size = nranks};
  ++state.alive;
  if (!state.held.contains(rank)) ++group->joined;
  if (rank == 0) (*comm)->runner = std::thread([created = *comm] { RunGroup(created); });
  state.changed.SignalAll();
  return ncclInProgress;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclInProgress; }

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Close(comm, &State::destroyed);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Close(comm, &State::aborted);
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInternalError:
      return "internal error";
    default:
      return "unhandled system error";
  }
}

const char* ncclGetLastError(ncclComm_t comm) { return "the fake's last words"; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* async_error) {
  State& state = TheState();
  MutexLock lock(&state.mutex);
  *async_error = comm->group->joined == comm->size ? ncclSuccess : ncclInProgress;
  const auto error = state.errors.find(comm->rank);
  if (error != state.errors.end()) *async_error = error->second;
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  HW_CHECK(op == ncclSum);
  return Queue(comm, {.type = type, .from = from, .to = to, .count = count});
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return Queue(comm, {.gather = true, .type = type, .from = from, .to = to, .count = count});
}

}  // extern "C"
