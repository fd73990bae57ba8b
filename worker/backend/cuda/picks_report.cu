// What a step tells of its picks, written to host memory: exact probabilities of the
// picks, and the estimated share of what was left out.
#include <cmath>

#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/scan_block.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = 128;

// One KV head of one token.
struct ReportWork {
  const WaveShape& shape;
  const WaveScratch& scratch;
  const RecallWave& wave;
  const RecallReport& report;
  int32_t group_size;
  int64_t list;       // of the token and KV head
  int64_t first_row;  // of its query rows
};

// What brings the weights of the picks to probabilities.
__device__ __forceinline__ double Factor(const SplitSum& picks, const SplitSum& total) {
  if (picks.maximum == -INFINITY) return 0;
  return exp(static_cast<double>(picks.maximum) - static_cast<double>(total.maximum)) / total.sum;
}

// Each probability is rounded on its own. All threads of the block.
__device__ __forceinline__ void ReportPicks(const ReportWork& work, int count, double* factors) {
  const WaveScratch& scratch = work.scratch;
  const int thread = static_cast<int>(threadIdx.x);
  for (int head = thread; head < work.group_size; head += kThreads) {
    const int64_t row = work.first_row + head;
    factors[head] = Factor(Load(scratch.sums + row * (scratch.splits + 1) + scratch.splits),
                           Load(scratch.totals + row));
  }
  __syncthreads();
  const RecallReport& report = work.report;
  const int32_t* picks = scratch.picks + work.list * scratch.max_picks;
  const int64_t end = min(static_cast<int64_t>(count), report.first + report.count);
  for (int64_t i = report.first + thread; i < end; i += kThreads) {
    int64_t gain = 0;
    for (int head = 0; head < work.group_size; ++head) {
      const float weight =
          Load(scratch.pick_weights + (work.first_row + head) * scratch.max_picks + i);
      gain += ToFixedPoint(static_cast<double>(weight) * factors[head]);
    }
    const int64_t to = work.list * report.count + i - report.first;
    StoreHost(report.picks + to, Load(picks + i));
    StoreHost(report.gains + to, gain);
  }
}

// By the first warp: the mean over heads of U / (1 + U), U the estimated mass left
// out relative to what was attended; infinite where nothing was.
__device__ __forceinline__ float MissingShare(const ReportWork& work, const RecallItem& item) {
  static_assert(kMaxScanParts == kWarp);
  const int lane = static_cast<int>(threadIdx.x);
  if (item.all != 0) return 0;
  double share = 0;
  for (int head = 0; head < work.group_size; ++head) {
    const double* parts = work.wave.scratch.masses + (work.first_row + head) * kMaxScanParts;
    const double mass = WarpSum(lane < item.parts ? Load(parts + lane) : 0.0);
    share += isinf(mass) ? 1.0 : mass / (1 + mass);
  }
  return static_cast<float>(share / work.group_size);
}

__global__ void __launch_bounds__(kThreads)
    ReportKernel(WaveShape shape, const WaveToken* tokens, WaveScratch scratch, RecallWave wave,
                 RecallReport report) {
  SharedCutter cutter(SharedMemory());
  RecallItem& item = *cutter.Take<RecallItem>(1);
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  double* factors = cutter.Take<double>(group_size);
  const int64_t token = blockIdx.y;
  const int recall = Load(&tokens[token].recall);
  if (recall < 0) return;  // the whole block
  LoadItem(wave.items + (recall - wave.first_item), item);
  const ReportWork work = {shape,
                           scratch,
                           wave,
                           report,
                           group_size,
                           token * shape.num_kv_heads + blockIdx.x,
                           token * shape.num_query_heads + int64_t{blockIdx.x} * group_size};
  const int count = Load(scratch.num_picks + work.list);
  if (threadIdx.x == 0) StoreHost(report.num_picks + work.list, count);
  if (item.report_missing != 0 && threadIdx.x < kWarp) {
    const float missing = MissingShare(work, item);
    if (threadIdx.x == 0) StoreHost(report.missing + work.list, missing);
  }
  if (item.report_picks != 0) ReportPicks(work, count, factors);
}

}  // namespace

cudaError_t LaunchRecallReport(const WaveShape& shape, const WaveToken* tokens,
                               const WaveScratch& scratch, const RecallWave& wave,
                               const RecallReport& report, cudaStream_t stream) {
  SharedCutter cutter(nullptr);
  cutter.Take<RecallItem>(1);
  cutter.Take<double>(shape.num_query_heads / shape.num_kv_heads);
  return Launch(ReportKernel, dim3(shape.num_kv_heads, shape.num_tokens), dim3(kThreads),
                cutter.bytes(), stream, shape, tokens, scratch, wave, report);
}

}  // namespace heavywater::cuda
