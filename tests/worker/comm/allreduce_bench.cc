// Compares ways to sum float32 over processes on one machine: Gloo's generic
// allreduce(), its AllreduceHalvingDoubling over synchronous pairs, and the
// GlooCommunicator. Results are checked before a figure is printed.
// Usage: heavywater-allreduce-bench [PROCESSES [REPEATS [nospin]]]
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/math.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/check.h"
#include "tests/worker/comm/shared_memory_rendezvous.h"
#include "worker/comm/communicator.h"
#include "worker/comm/gloo/gloo_connect.h"

namespace heavywater {
namespace {

// Calls per batch, and the untimed ones before them.
constexpr int kBatch = 8;
constexpr int kWarmUps = 2;

// A way to sum: given a length, what sums `data` in place.
using Sum = std::function<void()>;
struct Method {
  const char* name;
  std::function<Sum(const GlooOptions&, RendezvousStore&, std::vector<float>& data)> prepare;
};

std::shared_ptr<gloo::rendezvous::Context> Connect(const GlooOptions& options,
                                                   RendezvousStore& store) {
  auto connection = ConnectGloo(options, store);
  HW_CHECK(connection.ok());
  return connection->context;
}

Sum PrepareGeneric(const GlooOptions& options, RendezvousStore& store, std::vector<float>& data) {
  auto context = Connect(options, store);
  return [context, &data] {
    gloo::AllreduceOptions call(context);
    call.setOutput(data.data(), data.size());
    call.setReduceFunction(
        [](void* c, const void* a, const void* b, size_t n) { gloo::sum<float>(c, a, b, n); });
    gloo::allreduce(call);
  };
}

Sum PrepareHalvingDoubling(const GlooOptions& options, RendezvousStore& store,
                           std::vector<float>& data, bool busy_poll) {
  auto context = Connect(options, store);
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer != options.rank) context->getPair(peer)->setSync(true, busy_poll);
  }
  auto algorithm = std::make_shared<gloo::AllreduceHalvingDoubling<float>>(
      context, std::vector<float*>{data.data()}, static_cast<int>(data.size()));
  return [algorithm] { algorithm->run(); };
}

Sum PrepareCommunicator(const GlooOptions& options, RendezvousStore& store,
                        std::vector<float>& data) {
  auto created = CreateGlooCommunicator(options, store);
  HW_CHECK(created.ok());
  std::shared_ptr<Communicator> comm = *std::move(created);
  return [comm, &data] {
    Stream stream;
    HW_CHECK(comm->AllReduceSum(DeviceSpan<float>(data.data(), data.size()), stream).ok());
  };
}

const Method kMethods[] = {
    {"generic", PrepareGeneric},
    {"halving-doubling",
     [](const auto& options, auto& store, auto& data) {
       return PrepareHalvingDoubling(options, store, data, /*busy_poll=*/false);
     }},
    {"halving-doubling-spin",
     [](const auto& options, auto& store, auto& data) {
       return PrepareHalvingDoubling(options, store, data, /*busy_poll=*/true);
     }},
    {"communicator", PrepareCommunicator},
};

// Sums are integers that a float holds exactly: after `calls` calls in a row,
// each on the last one's result.
void CheckSum(const std::vector<float>& data, int size, int calls) {
  double want = size * (size + 1) / 2;
  for (int call = 1; call < calls; ++call) want *= size;
  for (size_t i = 0; i < data.size(); ++i) {
    HW_CHECK(data[i] == static_cast<float>(want * (i % 7)));
  }
}

// Times of one rank, in microseconds, into `times`. Filling and checking happen
// between batches, so that within one the ranks go in step.
void RunRank(const Method& method, const GlooOptions& options, RendezvousStore& store,
             int64_t bytes, std::span<double> times) {
  std::vector<float> data(bytes / sizeof(float));
  const Sum sum = method.prepare(options, store, data);
  for (size_t batch = 0; batch < times.size() / kBatch; ++batch) {
    for (size_t j = 0; j < data.size(); ++j) data[j] = (options.rank + 1) * (j % 7);
    for (int call = 0; call < kWarmUps + kBatch; ++call) {
      const absl::Time start = absl::Now();
      sum();
      const double time_us = absl::ToDoubleMicroseconds(absl::Now() - start);
      if (call >= kWarmUps) times[batch * kBatch + call - kWarmUps] = time_us;
    }
    CheckSum(data, options.size, kWarmUps + kBatch);
  }
}

// Forks one process per rank; the slowest rank's time counts, call by call.
void Measure(const Method& method, int size, int64_t bytes, int repeats) {
  SharedMemoryRendezvous store;
  const size_t shared_bytes = sizeof(double) * repeats * size;
  void* const shared =
      mmap(nullptr, shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  HW_CHECK(shared != MAP_FAILED);
  auto* const times = static_cast<double*>(shared);
  for (int rank = 0; rank < size; ++rank) {
    if (fork() != 0) continue;
    RunRank(method, {.rank = rank, .size = size, .key_prefix = "bench"}, store, bytes,
            {times + rank * repeats, static_cast<size_t>(repeats)});
    _exit(0);
  }
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    HW_CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  std::vector<double> slowest(times, times + repeats);
  for (int i = 0; i < repeats * size; ++i) {
    slowest[i % repeats] = std::max(slowest[i % repeats], times[i]);
  }
  munmap(shared, shared_bytes);
  std::ranges::sort(slowest);
  std::printf("%d processes %8lld bytes %-22s median %8.1f us  p90 %8.1f us  p99 %8.1f us\n", size,
              static_cast<long long>(bytes), method.name, slowest[repeats / 2],
              slowest[repeats * 9 / 10], slowest[repeats * 99 / 100]);
  std::fflush(stdout);
}

}  // namespace
}  // namespace heavywater

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  const int repeats =
      (argc > 2 ? std::atoi(argv[2]) : 1000) / heavywater::kBatch * heavywater::kBatch;
  const bool skip_spin = argc > 3;
  for (const int64_t bytes :
       {int64_t{1} << 10, int64_t{16} << 10, int64_t{256} << 10, int64_t{1} << 20}) {
    for (const heavywater::Method& method : heavywater::kMethods) {
      if (skip_spin && std::strstr(method.name, "spin") != nullptr) continue;
      heavywater::Measure(method, size, bytes, repeats);
    }
  }
  return 0;
}
