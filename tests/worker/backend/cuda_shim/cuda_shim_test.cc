// The shim itself: what it must find.
#include "cuda_shim.h"

#include <cuda_runtime.h>

#include <chrono>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/backend/cuda/device_code.h"
#include "worker/backend/cuda/launch.h"

namespace heavywater::cuda_shim {
namespace {

using cuda::kAllLanes;
using cuda::Load;
using cuda::SharedMemory;
using cuda::Store;
using testing::HasSubstr;

constexpr Order kOrders[] = {Order::kForward, Order::kReverse, Order::kRandom};

class CudaShimTest : public testing::Test {
 protected:
  ~CudaShimTest() override {
    TakeFailure();
    for (void* memory : memory_) EXPECT_EQ(cudaFree(memory), cudaSuccess);
    SetOptions({});
  }

  template <typename T>
  T* Allocate(int64_t count) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, count * sizeof(T)), cudaSuccess);
    memory_.push_back(memory);
    return static_cast<T*>(memory);
  }
  template <typename T>
  std::vector<T> Read(const T* from, int64_t count) {
    std::vector<T> to(count);
    EXPECT_EQ(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return to;
  }

 private:
  std::vector<void*> memory_;
};

__global__ void write_indices(int* out) {
  const unsigned block = blockIdx.x + gridDim.x * blockIdx.y;
  const unsigned thread = threadIdx.x + blockDim.x * threadIdx.y;
  Store(out + block * blockDim.x * blockDim.y + thread, static_cast<int>(1000 * block + thread));
}

TEST_F(CudaShimTest, EveryThreadOfEveryBlockRunsOnce) {
  for (const Order order : kOrders) {
    SetOptions({.order = order, .seed = 3});
    int* out = Allocate<int>(6 * 80);
    ASSERT_EQ(cuda::Launch(write_indices, dim3(3, 2), dim3(20, 4), 0, nullptr, out), cudaSuccess);
    const std::vector<int> read = Read(out, 6 * 80);
    for (int i = 0; i < 6 * 80; ++i) EXPECT_EQ(read[i], 1000 * (i / 80) + i % 80);
  }
}

// Each thread reads what its neighbour of another warp wrote.
template <bool kBarrier>
__global__ void rotate(int* out) {
  int* shared = reinterpret_cast<int*>(SharedMemory());
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kBarrier) __syncthreads();
  Store(out + threadIdx.x, shared[(threadIdx.x + 40) % blockDim.x]);
}

TEST_F(CudaShimTest, AMissingBarrierShowsInEveryOrder) {
  for (const Order order : kOrders) {
    SetOptions({.order = order});
    std::vector<int> expected(128);
    for (int i = 0; i < 128; ++i) expected[i] = (i + 40) % 128;
    int* out = Allocate<int>(128);
    ASSERT_EQ(cuda::Launch(rotate<true>, 1, 128, 512, nullptr, out), cudaSuccess);
    EXPECT_EQ(Read(out, 128), expected);
    ASSERT_EQ(cuda::Launch(rotate<false>, 1, 128, 512, nullptr, out), cudaSuccess);
    EXPECT_NE(Read(out, 128), expected);
  }
}

// Lane i reads what lane `source` wrote before.
template <bool kSync>
__global__ void hand_over(int source, int* out) {
  int* shared = reinterpret_cast<int*>(SharedMemory());
  if (static_cast<int>(threadIdx.x) == source) shared[0] = 5;
  if (kSync) __syncwarp();
  Store(out + threadIdx.x, shared[0]);
}

TEST_F(CudaShimTest, AMissingWarpBarrierShowsInSomeOrder) {
  int* out = Allocate<int>(32);
  int stale = 0;
  for (const Order order : kOrders) {
    SetOptions({.order = order});
    ASSERT_EQ(cuda::Launch(hand_over<true>, 1, 32, 4, nullptr, 0, out), cudaSuccess);
    EXPECT_EQ(Read(out, 32), std::vector<int>(32, 5));
    ASSERT_EQ(cuda::Launch(hand_over<false>, 1, 32, 4, nullptr, 0, out), cudaSuccess);
    stale += Read(out, 32) != std::vector<int>(32, 5) ? 1 : 0;
  }
  EXPECT_GE(stale, 1);
}

__global__ void read_shared(unsigned* out) {
  Store(out + blockIdx.x, reinterpret_cast<unsigned*>(SharedMemory())[3]);
  reinterpret_cast<unsigned*>(SharedMemory())[3] = 7;
}

TEST_F(CudaShimTest, SharedMemoryIsPoisonedBeforeEveryBlock) {
  unsigned* out = Allocate<unsigned>(3);
  ASSERT_EQ(cuda::Launch(read_shared, 3, 1, 16, nullptr, out), cudaSuccess);
  EXPECT_EQ(Read(out, 3), std::vector<unsigned>(3, 0xffffffffu));
  SetOptions({.poison = Poison::kRandom});
  ASSERT_EQ(cuda::Launch(read_shared, 3, 1, 16, nullptr, out), cudaSuccess);
  const std::vector<unsigned> read = Read(out, 3);
  EXPECT_NE(read[0], 7u);
  EXPECT_NE(read[1], 7u);
  EXPECT_NE(read[0], read[1]);
}

TEST_F(CudaShimTest, NewDeviceMemoryIsPoisoned) {
  EXPECT_EQ(Read(Allocate<uint8_t>(1000), 1000), std::vector<uint8_t>(1000, 0xff));
}

// Fails and says why.
class CudaShimFailureTest : public CudaShimTest {
 protected:
  template <typename... Params, typename... Args>
  std::string Run(void (*kernel)(Params...), dim3 block, size_t shared, Args... args) {
    EXPECT_EQ(cuda::Launch(kernel, 2, block, shared, nullptr, args...), cudaErrorLaunchFailure);
    // It stays.
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    return TakeFailure();
  }
};

__global__ void shuffle_in_half_a_warp() {
  if (threadIdx.x % 32 < 16) __shfl_xor_sync(kAllLanes, 1, 1);
}

TEST_F(CudaShimFailureTest, ALaneMissingAtAShuffleIsNamed) {
  EXPECT_THAT(Run(shuffle_in_half_a_warp, 64, 0),
              testing::AllOf(HasSubstr("shuffle_in_half_a_warp, block 0,0,0, thread 16,0,0"),
                             HasSubstr("has ended"), HasSubstr("diverge")));
  SetOptions({.order = Order::kReverse});
  EXPECT_THAT(Run(shuffle_in_half_a_warp, 64, 0), HasSubstr("block 1,0,0, thread 48,0,0"));
}

__global__ void leave_before_a_barrier() {
  if (threadIdx.x >= 64) return;
  __syncthreads();
}

TEST_F(CudaShimFailureTest, AThreadThatHasLeftBeforeABarrierIsNamed) {
  EXPECT_THAT(Run(leave_before_a_barrier, 96, 0),
              testing::AllOf(HasSubstr("thread 64,0,0: has ended"), HasSubstr("__syncthreads")));
}

__global__ void barrier_or_shuffle() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

TEST_F(CudaShimFailureTest, LanesAtDifferentStopsAreNamed) {
  EXPECT_THAT(Run(barrier_or_shuffle, 32, 0),
              testing::AllOf(HasSubstr("__syncwarp"), HasSubstr("__syncthreads")));
}

__global__ void vote_of_half() { __any_sync(0xffff, 1); }
__global__ void vote() { __any_sync(kAllLanes, 1); }

TEST_F(CudaShimFailureTest, PartialMasksAndWarpsAreRefused) {
  EXPECT_THAT(Run(vote_of_half, 32, 0), HasSubstr("mask"));
  EXPECT_THAT(Run(vote, 40, 0), HasSubstr("warp of 8 lanes"));
}

__global__ void load_at(const float* address) { Load(address); }
__global__ void load_four_at(const float* address) {
  Load(reinterpret_cast<const float4*>(address));
}
__global__ void store_at(float* address) { Store(address, 1); }

TEST_F(CudaShimFailureTest, AccessBesideAnAllocationOrNotAlignedFails) {
  float* memory = Allocate<float>(5);
  EXPECT_EQ(cuda::Launch(load_at, 1, 1, 0, nullptr, memory + 4), cudaSuccess);
  EXPECT_THAT(Run(load_at, 1, 0, memory + 5), HasSubstr("Load of 4 bytes"));
  EXPECT_THAT(Run(store_at, 1, 0, memory - 1), HasSubstr("Store of 4 bytes"));
  EXPECT_THAT(Run(load_four_at, 1, 0, memory + 4), HasSubstr("no such memory"));
  EXPECT_THAT(Run(load_four_at, 1, 0, memory + 1), HasSubstr("not aligned"));
  float on_the_host = 0;
  EXPECT_THAT(Run(load_at, 1, 0, &on_the_host), HasSubstr("no such memory"));
}

TEST_F(CudaShimFailureTest, AccessAfterFreeFails) {
  float* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 4), cudaSuccess);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_THAT(Run(load_at, 1, 0, memory), HasSubstr("no such memory"));
}

__global__ void write_behind_shared() { SharedMemory()[100] = 1; }

TEST_F(CudaShimFailureTest, WritesBehindSharedMemoryAreFound) {
  EXPECT_THAT(Run(write_behind_shared, 1, 100), HasSubstr("byte 100 of shared memory"));
}

TEST_F(CudaShimFailureTest, RawWritesBesideAnAllocationAreFoundWhenItIsFreed) {
  uint8_t* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 10), cudaSuccess);
  memory[10] = 0;
  EXPECT_THAT(DamagedGuards(), HasSubstr("byte 10"));
  EXPECT_EQ(cudaFree(memory), cudaErrorLaunchFailure);
  EXPECT_THAT(TakeFailure(), HasSubstr("byte 10 of an allocation of 10"));
}

__global__ void nothing() {}

TEST_F(CudaShimTest, LimitsOfALaunchAreTheDevices) {
  EXPECT_EQ(cuda::Launch(nothing, 1, 1025, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cuda::Launch(nothing, dim3(1, 65536), 1, 0, nullptr), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cuda::Launch(nothing, 1, 32, 227 * 1024, nullptr), cudaSuccess);
  EXPECT_EQ(cuda::Launch(nothing, 1, 32, 227 * 1024 + 1, nullptr), cudaErrorInvalidValue);
  // Without raising the limit first.
  cudaLaunchConfig_t config = {};
  config.dynamicSmemBytes = 49 * 1024;
  EXPECT_EQ(cudaLaunchKernelEx(&config, vote), cudaErrorInvalidValue);
}

__global__ void warp_functions(int* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto put = [&](int row, int value) { Store(out + row * 32 + lane, value); };
  put(0, __shfl_sync(kAllLanes, lane * 10, lane / 2));
  put(1, __shfl_up_sync(kAllLanes, lane, 3));
  put(2, __shfl_down_sync(kAllLanes, lane, 3, 8));
  put(3, __shfl_xor_sync(kAllLanes, lane, 5));
  put(4, static_cast<int>(__ballot_sync(kAllLanes, lane % 3 == 0)));
  put(5, __reduce_max_sync(kAllLanes, lane == 7 ? 100 : -lane));
  put(6, __all_sync(kAllLanes, lane >= 0) * 2 + __any_sync(kAllLanes, lane == 40));
  put(7, static_cast<int>(__shfl_sync(kAllLanes, int64_t{1} << (lane + 20), 15) >> 32));
  put(8, static_cast<int>(__match_any_sync(kAllLanes, lane % 16)));
  put(9, __syncthreads_count(lane < 5) * 100 + __syncthreads_or(0) * 10 + __syncthreads_and(1));
}

TEST_F(CudaShimTest, WarpFunctionsMeanWhatCudaSays) {
  for (const Order order : kOrders) {
    SetOptions({.order = order, .seed = 9});
    int* out = Allocate<int>(10 * 32);
    ASSERT_EQ(cuda::Launch(warp_functions, 1, 32, 0, nullptr, out), cudaSuccess);
    const std::vector<int> read = Read(out, 10 * 32);
    for (int lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(read[lane], lane / 2 * 10);
      EXPECT_EQ(read[32 + lane], lane < 3 ? lane : lane - 3);
      EXPECT_EQ(read[64 + lane], lane % 8 < 5 ? lane + 3 : lane);
      EXPECT_EQ(read[96 + lane], lane ^ 5);
      EXPECT_EQ(read[128 + lane], 0b01001001001001001001001001001001);
      EXPECT_EQ(read[160 + lane], 100);
      EXPECT_EQ(read[192 + lane], 2);
      EXPECT_EQ(read[224 + lane], 8);
      EXPECT_EQ(read[256 + lane], 0x10001 << (lane % 16));
      EXPECT_EQ(read[288 + lane], 501);
    }
  }
}

__global__ void add_one(int* value) { Store(value, Load(value) + 1); }

TEST_F(CudaShimTest, BytesAreCounted) {
  int* value = Allocate<int>(1);
  ResetCounters();
  ASSERT_EQ(cuda::Launch(add_one, 5, 1, 0, nullptr, value), cudaSuccess);
  const Counters counters = ReadCounters();
  EXPECT_EQ(counters.loaded, 20);
  EXPECT_EQ(counters.stored, 20);
  EXPECT_EQ(counters.host_loaded + counters.host_stored, 0);
  EXPECT_EQ(counters.launches, 1);
}

TEST_F(CudaShimTest, LateWorkRunsWhenItIsWaitedFor) {
  int* value = Allocate<int>(1);
  ASSERT_EQ(cudaMemset(value, 0, 4), cudaSuccess);
  int* pinned = nullptr;
  ASSERT_EQ(cudaHostAlloc(&pinned, 4, cudaHostAllocDefault), cudaSuccess);
  *pinned = -1;
  SetOptions({.progress = Progress::kLate});
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cuda::Launch(add_one, 1, 1, 0, stream, value), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned, value, 4, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(*pinned, -1);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(*pinned, 1);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  ASSERT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

TEST_F(CudaShimTest, AnEventOrdersStreams) {
  int* value = Allocate<int>(1);
  ASSERT_EQ(cudaMemset(value, 0, 4), cudaSuccess);
  for (const bool waits : {true, false}) {
    SetOptions({.progress = Progress::kLate});
    cudaStream_t first = nullptr;
    cudaStream_t second = nullptr;
    cudaEvent_t event = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(value, 0, 4, first), cudaSuccess);
    ASSERT_EQ(cuda::Launch(add_one, 1, 1, 0, first, value), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
    if (waits) {
      ASSERT_EQ(cudaStreamWaitEvent(second, event), cudaSuccess);
    }
    ASSERT_EQ(cuda::Launch(add_one, 1, 1, 0, second, value), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(first), cudaSuccess);
    EXPECT_EQ(Read(value, 1)[0], waits ? 2 : 1);
    ASSERT_EQ(cudaStreamDestroy(first), cudaSuccess);
    ASSERT_EQ(cudaStreamDestroy(second), cudaSuccess);
    ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  }
}

TEST_F(CudaShimTest, CapturedWorkRunsWhenTheGraphIsLaunched) {
  int* value = Allocate<int>(1);
  ASSERT_EQ(cudaMemset(value, 0, 4), cudaSuccess);
  cudaStream_t stream = nullptr;
  cudaStream_t side = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  for (const bool joins : {true, false}) {
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ASSERT_EQ(cuda::Launch(add_one, 1, 1, 0, stream, value), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(side, event), cudaSuccess);
    ASSERT_EQ(cuda::Launch(add_one, 1, 1, 0, side, value), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, side), cudaSuccess);
    if (joins) {
      ASSERT_EQ(cudaStreamWaitEvent(stream, event), cudaSuccess);
    }
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 4), cudaErrorStreamCaptureUnsupported);
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph),
              joins ? cudaSuccess : cudaErrorStreamCaptureUnjoined);
    if (!joins) continue;
    EXPECT_EQ(Read(value, 1)[0], 0);
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    EXPECT_EQ(Read(value, 1)[0], 4);
    ASSERT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(side), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(CudaShimTest, MemoryEndsWhereTheDevicesDoes) {
  SetOptions({.device_memory_bytes = AllocatedBytes() + 1000});
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 1001), cudaErrorMemoryAllocation);
}

TEST_F(CudaShimTest, RegisteredHostMemoryIsReached) {
  std::vector<float> host(4);
  EXPECT_EQ(cudaHostUnregister(host.data()), cudaErrorHostMemoryNotRegistered);
  ASSERT_EQ(cudaHostRegister(host.data(), 16, cudaHostRegisterMapped), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(host.data() + 1, 4, 0), cudaErrorHostMemoryAlreadyRegistered);
  ASSERT_EQ(cudaHostUnregister(host.data()), cudaSuccess);
}

__global__ void many_switches(int rounds, int* out) {
  int sum = static_cast<int>(threadIdx.x);
  for (int i = 0; i < rounds; ++i) sum = __shfl_xor_sync(kAllLanes, sum, 1) + 1;
  Store(out + threadIdx.x, sum);
}

TEST_F(CudaShimTest, ASwitchIsCheap) {
  int* out = Allocate<int>(256);
  constexpr int kRounds = 20000;
  const auto start = std::chrono::steady_clock::now();
  ASSERT_EQ(cuda::Launch(many_switches, 1, 256, 0, nullptr, kRounds, out), cudaSuccess);
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  RecordProperty("ns_per_switch", std::to_string(took.count() / 256 / kRounds));
  std::printf("a switch takes %.1f ns\n", took.count() / 256 / kRounds);
  EXPECT_EQ(Read(out, 1)[0], kRounds);
}

}  // namespace
}  // namespace heavywater::cuda_shim
