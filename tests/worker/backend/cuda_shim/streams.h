// Queues of work and what orders them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "runtime_api.h"

namespace heavywater::cuda_shim {

using Work = std::function<cudaError_t()>;

// A place in a stream.
struct Record {
  CUstream_st* stream = nullptr;
  bool done = false;
};

// Of a capture: how much of each stream's work lies before a place.
using Clock = std::map<const CUstream_st*, int64_t>;
struct Capture {
  CUstream_st* origin = nullptr;
  unsigned long long id = 0;  // NOLINT(google-runtime-int)
  bool ended = false;
  std::vector<Work> work;  // in the order in which it was enqueued
};

// Guards everything of the runtime; a thread that runs a kernel holds it.
class RuntimeLock {
 public:
  RuntimeLock();
  ~RuntimeLock();
};

// Null is the default stream. Runs the work, or keeps it for later, or records it.
cudaError_t Enqueue(cudaStream_t stream, Work work);
// Runs what is left.
cudaError_t Finish(cudaStream_t stream);
cudaError_t FinishAll();
bool AnyCapture();
bool IsCapturing(cudaStream_t stream);
// The first error of work that ran, until it is taken.
cudaError_t StickyError();
void SetStickyError(cudaError_t error);

}  // namespace heavywater::cuda_shim

struct CUstream_st {
  bool non_blocking = false;
  std::deque<heavywater::cuda_shim::Work> queue;
  std::shared_ptr<heavywater::cuda_shim::Capture> capture;
  heavywater::cuda_shim::Clock clock;
};
struct CUevent_st {
  std::shared_ptr<heavywater::cuda_shim::Record> record;
  std::shared_ptr<heavywater::cuda_shim::Capture> capture;
  heavywater::cuda_shim::Clock clock;
};
struct CUgraph_st {
  std::vector<heavywater::cuda_shim::Work> work;
};
struct CUgraphExec_st {
  std::vector<heavywater::cuda_shim::Work> work;
};
