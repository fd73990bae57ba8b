#include "streams.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "cuda_shim.h"
#include "random.h"

namespace heavywater::cuda_shim {
namespace {

struct Streams {
  std::recursive_mutex mutex;
  CUstream_st default_stream;
  std::set<CUstream_st*> created;
  Random random{1};
  cudaError_t sticky = cudaSuccess;
  int captures = 0;                     // under way
  unsigned long long last_capture = 0;  // NOLINT(google-runtime-int)
};
Streams& All() {
  static auto* streams = new Streams;
  return *streams;
}

CUstream_st* Resolve(cudaStream_t stream) {
  return stream == nullptr ? &All().default_stream : stream;
}
bool Exists(const CUstream_st* stream) {
  return stream == &All().default_stream ||
         All().created.count(const_cast<CUstream_st*>(stream)) > 0;
}

void Step(CUstream_st* stream) {
  const Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (All().sticky != cudaSuccess) return;
  if (const cudaError_t error = work(); error != cudaSuccess) All().sticky = error;
}
void Drain(CUstream_st* stream) {
  while (!stream->queue.empty()) Step(stream);
}

// The default stream and those that are not "non-blocking" wait for each other.
void DrainBefore(CUstream_st* stream) {
  if (stream == &All().default_stream) {
    for (CUstream_st* other : All().created) {
      if (!other->non_blocking) Drain(other);
    }
  } else if (!stream->non_blocking) {
    Drain(&All().default_stream);
  }
}

void ProgressAtRandom() {
  Streams& all = All();
  std::vector<CUstream_st*> streams(all.created.begin(), all.created.end());
  streams.push_back(&all.default_stream);
  for (uint64_t steps = all.random.Next() % 4; steps > 0; --steps) {
    CUstream_st* stream = streams[all.random.Next() % streams.size()];
    if (!stream->queue.empty()) Step(stream);
  }
}

void MakeProgress() {
  switch (CurrentOptions().progress) {
    case Progress::kAtOnce:
      for (CUstream_st* stream : All().created) Drain(stream);
      return Drain(&All().default_stream);
    case Progress::kRandom:
      return ProgressAtRandom();
    case Progress::kLate:
      return;
  }
}

void MergeClock(Clock& into, const Clock& from) {
  for (const auto& [stream, count] : from) into[stream] = std::max(into[stream], count);
}

}  // namespace

RuntimeLock::RuntimeLock() { All().mutex.lock(); }
RuntimeLock::~RuntimeLock() { All().mutex.unlock(); }

cudaError_t StickyError() { return All().sticky; }
void SetStickyError(cudaError_t error) { All().sticky = error; }
bool AnyCapture() { return All().captures > 0; }
bool IsCapturing(cudaStream_t stream) { return Resolve(stream)->capture != nullptr; }

cudaError_t Enqueue(cudaStream_t handle, Work work) {
  CUstream_st* stream = Resolve(handle);
  if (!Exists(stream)) return cudaErrorInvalidResourceHandle;
  if (All().sticky != cudaSuccess) return All().sticky;
  if (stream->capture != nullptr) {
    stream->capture->work.push_back(std::move(work));
    ++stream->clock[stream];
    return cudaSuccess;
  }
  DrainBefore(stream);
  stream->queue.push_back(std::move(work));
  MakeProgress();
  return All().sticky;
}

cudaError_t Finish(cudaStream_t handle) {
  CUstream_st* stream = Resolve(handle);
  if (!Exists(stream)) return cudaErrorInvalidResourceHandle;
  if (stream->capture != nullptr) return cudaErrorStreamCaptureUnsupported;
  DrainBefore(stream);
  Drain(stream);
  return All().sticky;
}

cudaError_t FinishAll() {
  if (AnyCapture()) return cudaErrorStreamCaptureUnsupported;
  Drain(&All().default_stream);
  for (CUstream_st* stream : All().created) Drain(stream);
  return All().sticky;
}

}  // namespace heavywater::cuda_shim

using heavywater::cuda_shim::All;
using heavywater::cuda_shim::Capture;
using heavywater::cuda_shim::Record;
using heavywater::cuda_shim::Resolve;
using heavywater::cuda_shim::RuntimeLock;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const RuntimeLock lock;
  *stream = new CUstream_st;
  (*stream)->non_blocking = (flags & cudaStreamNonBlocking) != 0;
  All().created.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const RuntimeLock lock;
  if (All().created.count(stream) == 0) return cudaErrorInvalidResourceHandle;
  const cudaError_t finished = heavywater::cuda_shim::Finish(stream);
  All().created.erase(stream);
  delete stream;
  return finished;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const RuntimeLock lock;
  return heavywater::cuda_shim::Finish(stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const RuntimeLock lock;
  CUstream_st* resolved = Resolve(stream);
  if (All().sticky != cudaSuccess) return All().sticky;
  if (resolved->queue.empty()) return cudaSuccess;
  // Whoever polls gets there.
  heavywater::cuda_shim::Step(resolved);
  return cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const RuntimeLock lock;
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const RuntimeLock lock;
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  CUstream_st* resolved = Resolve(stream);
  event->capture = resolved->capture;
  event->record = nullptr;
  if (event->capture != nullptr) {
    event->clock = resolved->clock;
    return cudaSuccess;
  }
  event->record = std::make_shared<Record>(Record{.stream = resolved, .done = false});
  return heavywater::cuda_shim::Enqueue(stream, [record = event->record] {
    record->done = true;
    return cudaSuccess;
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const RuntimeLock lock;
  if (event->capture != nullptr) return cudaErrorCapturedEvent;
  const std::shared_ptr<Record> record = event->record;
  while (record != nullptr && !record->done && All().sticky == cudaSuccess) {
    heavywater::cuda_shim::Step(record->stream);
  }
  return All().sticky;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const RuntimeLock lock;
  if (event->capture != nullptr) return cudaErrorCapturedEvent;
  if (All().sticky != cudaSuccess) return All().sticky;
  if (event->record == nullptr || event->record->done) return cudaSuccess;
  heavywater::cuda_shim::Step(event->record->stream);
  return cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 0.001f;  // there is no device whose time could be told
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  const RuntimeLock lock;
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  CUstream_st* resolved = Resolve(stream);
  if (event->capture != nullptr && event->capture->ended) return cudaErrorCapturedEvent;
  if (event->capture != nullptr) {
    // The stream joins the capture.
    if (resolved->capture != nullptr && resolved->capture != event->capture) {
      return cudaErrorStreamCaptureUnsupported;
    }
    resolved->capture = event->capture;
    heavywater::cuda_shim::MergeClock(resolved->clock, event->clock);
    return cudaSuccess;
  }
  if (event->record == nullptr || event->record->done) return cudaSuccess;
  if (resolved->capture != nullptr) return cudaErrorStreamCaptureUnsupported;
  return heavywater::cuda_shim::Enqueue(stream, [record = event->record] {
    while (!record->done && All().sticky == cudaSuccess) {
      heavywater::cuda_shim::Step(record->stream);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const RuntimeLock lock;
  if (stream == nullptr || stream->capture != nullptr) return cudaErrorStreamCaptureUnsupported;
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream;
  stream->capture->id = ++All().last_capture;
  stream->clock.clear();
  ++All().captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const RuntimeLock lock;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr || capture->origin != stream) return cudaErrorInvalidValue;
  bool joined = true;
  for (CUstream_st* other : All().created) {
    if (other->capture != capture) continue;
    if (other != stream) joined &= other->clock[other] <= stream->clock[other];
    other->capture = nullptr;
  }
  for (CUstream_st* other : All().created) other->clock.clear();
  capture->ended = true;
  --All().captures;
  if (!joined) return cudaErrorStreamCaptureUnjoined;
  *graph = new CUgraph_st{.work = capture->work};
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const RuntimeLock lock;
  *status = Resolve(stream)->capture != nullptr ? cudaStreamCaptureStatusActive
                                                : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {  // NOLINT(google-runtime-int)
  const RuntimeLock lock;
  const std::shared_ptr<Capture>& capture = Resolve(stream)->capture;
  *status = capture != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (capture != nullptr && id != nullptr) *id = capture->id;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags) {  // NOLINT(google-runtime-int)
  *exec = new CUgraphExec_st{.work = graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const RuntimeLock lock;
  return heavywater::cuda_shim::Enqueue(stream, [work = exec->work] {
    for (const auto& step : work) {
      if (const cudaError_t error = step(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
