// Runs one kernel: who runs next, and what threads hand to each other.
//
// A warp runs in passes: each of its lanes runs until it stops, at a warp function, at
// a barrier of the block, or because it has ended. All must have stopped at the same;
// then the next pass begins. So every warp function is a rendezvous without a queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "vector_types.h"

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

namespace heavywater::cuda_shim {

// Why a thread stopped.
enum class Stop : uint8_t {
  kRunning,
  kEnded,
  kSyncThreads,
  kSyncThreadsCount,  // this and the next two return a value, too
  kSyncThreadsAnd,
  kSyncThreadsOr,
  kSyncWarp,  // this and the following: warp functions
  kShuffle,
  kVote,
  kMatch,
  kReduce,
  kGather,
};

inline constexpr int kWarpSize = 32;
inline constexpr int kGatherBytes = 64;  // a lane's share of a kGather, at most

struct Warp {
  // By generation, even and odd: a lane that runs ahead writes the one while others
  // still read the other.
  uint64_t values[2][kWarpSize];
  alignas(16) std::byte wide[2][kWarpSize][kGatherBytes];
  unsigned votes[2];
  Stop stops[kWarpSize];
  uint8_t order[kWarpSize];  // of the lanes
  int generation;            // 0 or 1
  int lanes;
  bool at_barrier;
  bool ended;
};

// The running thread. Valid within a kernel only.
struct Running {
  Warp* warp = nullptr;  // null: no kernel runs
  int thread = 0;        // linear, in the block
  int lane = 0;
};
extern Running running;

// Stops the running thread; returns when all have stopped at the same.
void StopAt(Stop stop);
// Ends the kernel: the launch reports `message` and where it happened.
[[noreturn]] void FailKernel(const std::string& message);
// Warp functions want whole warps and the full mask.
void CheckMask(unsigned mask);
// StopAt() one of kSyncThreads*; the sum, and and or of `value` over the block.
int BlockReduce(Stop stop, int value);

// The block's dynamic shared memory.
std::byte* SharedArena();

struct Launch {
  const void* kernel = nullptr;  // for its name in messages
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  std::function<void()> body;  // a thread's work
};
// Runs it. Empty, or what failed.
std::string RunKernel(const Launch& launch);

// Name of a function, by the executable's symbol table.
std::string FunctionName(const void* function);

}  // namespace heavywater::cuda_shim
