#include "engine.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_shim.h"
#include "fiber.h"
#include "random.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace heavywater::cuda_shim {

Running running;

namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kArenaBytes = 256 * 1024;
// Behind the shared memory that was asked for; must stay as it was poisoned.
constexpr size_t kGuardBytes = 1024;

const char* NameOf(Stop stop) {
  constexpr const char* kNames[] = {"running",
                                    "has ended",
                                    "waits in __syncthreads",
                                    "waits in __syncthreads_count",
                                    "waits in __syncthreads_and",
                                    "waits in __syncthreads_or",
                                    "waits in __syncwarp",
                                    "waits in a shuffle",
                                    "waits in a vote",
                                    "waits in a match",
                                    "waits in a warp reduction",
                                    "waits in a gather of lanes"};
  return kNames[static_cast<int>(stop)];
}

bool IsOfBlock(Stop stop) { return stop >= Stop::kSyncThreads && stop <= Stop::kSyncThreadsOr; }

// Takes a thread that fails back to where it began, so that it leaves nothing behind.
struct Failed {};

class Engine {
 public:
  std::string Run(const Launch& launch);
  void StopAt(Stop stop);
  [[noreturn]] void Fail(const std::string& message);
  int Reduce(Stop stop, int value);
  std::byte* arena() { return arena_; }

 private:
  static void Entry();

  void Prepare(const Launch& launch);
  void RunBlock();
  void CheckGuard();
  void OrderWarps();
  int EndOfPass();
  int StartOfPass(int warp);
  int NextWarp(bool may_stay);
  int FirstRunnable() const;
  void ReleaseBarrier();
  void CheckSameStop(const Warp& warp);
  void FailBarrier();
  std::string Where(int thread) const;

  const Launch* launch_ = nullptr;
  std::string failure_;
  Fiber host_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<int> warp_order_;
  std::vector<uint3> indices_;
  int num_threads_ = 0;
  int num_warps_ = 0;
  int warp_ = 0;  // that runs
  int turn_ = 0;  // its lane order[turn_] runs
  int waiting_ = 0;
  int ended_ = 0;
  Stop barrier_ = Stop::kRunning;
  int barrier_generation_ = 0;
  struct {
    int count, all, any;
  } reduced_[2] = {};
  Random random_{1};
  alignas(1024) std::byte arena_[kArenaBytes];
};

Engine& TheEngine() {
  static auto* engine = new Engine;
  return *engine;
}

std::string Engine::Run(const Launch& launch) {
  launch_ = &launch;
  failure_.clear();
  host_ = Fiber();
  Prepare(launch);
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  const Order order = CurrentOptions().order;
  // A random rotation and direction: every block once, without a table.
  const uint64_t start = order == Order::kRandom ? random_.Next() % blocks : 0;
  const bool reverse =
      order == Order::kReverse || (order == Order::kRandom && random_.Next() % 2 == 0);
  for (uint64_t i = 0; i < blocks && failure_.empty(); ++i) {
    uint64_t block = (start + i) % blocks;
    if (reverse) block = blocks - 1 - block;
    blockIdx.x = static_cast<unsigned>(block % launch.grid.x);
    blockIdx.y = static_cast<unsigned>(block / launch.grid.x % launch.grid.y);
    blockIdx.z = static_cast<unsigned>(block / launch.grid.x / launch.grid.y);
    RunBlock();
  }
  running.warp = nullptr;
  if (!failure_.empty()) {
    for (int i = 0; i < num_threads_; ++i) ForgetStack(fibers_[i]);
  }
  return std::exchange(failure_, {});
}

void Engine::Prepare(const Launch& launch) {
  blockDim = launch.block;
  gridDim = launch.grid;
  num_threads_ = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  num_warps_ = (num_threads_ + kWarpSize - 1) / kWarpSize;
  while (static_cast<int>(fibers_.size()) < num_threads_) CreateFiber(fibers_.emplace_back());
  warps_.resize(std::max<size_t>(warps_.size(), num_warps_));
  indices_.resize(num_threads_);
  for (int i = 0; i < num_threads_; ++i) {
    const auto thread = static_cast<unsigned>(i);
    indices_[i] = {thread % launch.block.x, thread / launch.block.x % launch.block.y,
                   thread / launch.block.x / launch.block.y};
  }
  warp_order_.resize(num_warps_);
  random_ = Random(CurrentOptions().seed * 1000003 + ReadCounters().launches);
}

void Engine::OrderWarps() {
  const Order order = CurrentOptions().order;
  for (int i = 0; i < num_warps_; ++i) {
    warp_order_[i] = order == Order::kReverse ? num_warps_ - 1 - i : i;
  }
  if (order == Order::kRandom) random_.Shuffle(warp_order_.data(), num_warps_);
  for (int i = 0; i < num_warps_; ++i) {
    Warp& warp = warps_[i];
    warp.lanes = std::min(kWarpSize, num_threads_ - i * kWarpSize);
    warp.generation = 0;
    warp.at_barrier = false;
    warp.ended = false;
    warp.votes[0] = warp.votes[1] = 0;
    std::fill_n(warp.stops, kWarpSize, Stop::kRunning);
    for (int lane = 0; lane < warp.lanes; ++lane) {
      warp.order[lane] =
          static_cast<uint8_t>(order == Order::kReverse ? warp.lanes - 1 - lane : lane);
    }
    if (order == Order::kRandom) random_.Shuffle(warp.order, warp.lanes);
  }
}

void Engine::RunBlock() {
  const size_t poisoned = std::min(launch_->shared_bytes + kGuardBytes, kArenaBytes);
  random_.Fill(CurrentOptions().poison == Poison::kRandom, arena_, poisoned);
  std::memset(arena_ + launch_->shared_bytes, 0xa5, poisoned - launch_->shared_bytes);
  OrderWarps();
  waiting_ = ended_ = 0;
  barrier_generation_ = 0;
  reduced_[0] = reduced_[1] = {0, 1, 0};
  for (int i = 0; i < num_threads_; ++i) ResetFiber(fibers_[i], &Engine::Entry);
  const int first = StartOfPass(warp_order_[0]);
  SwitchFiber(host_, fibers_[first]);
  if (failure_.empty()) CheckGuard();
}

void Engine::CheckGuard() {
  const std::byte* guard = arena_ + launch_->shared_bytes;
  for (size_t i = 0; i < kGuardBytes; ++i) {
    if (guard[i] == std::byte{0xa5}) continue;
    failure_ = "kernel " + FunctionName(launch_->kernel) + ", block " + std::to_string(blockIdx.x) +
               "," + std::to_string(blockIdx.y) + "," + std::to_string(blockIdx.z) +
               ": wrote byte " + std::to_string(launch_->shared_bytes + i) +
               " of shared memory, which has " + std::to_string(launch_->shared_bytes);
    return;
  }
}

void Engine::Entry() {
  FiberEntered();
  Engine& engine = TheEngine();
  try {
    engine.launch_->body();
    engine.StopAt(Stop::kEnded);
  } catch (const Failed&) {
    // The kernel ends here. The switch comes after the handler: whoever runs next may
    // throw, too.
  }
  static Fiber ended;  // never gone back to
  SwitchFiber(ended, engine.host_);
  std::abort();  // nobody goes on with a thread that has ended
}

void Engine::StopAt(Stop stop) {
  const int thread = running.thread;
  running.warp->stops[running.lane] = stop;
  ++turn_;
  int next = 0;
  if (turn_ < running.warp->lanes) {
    next = warp_ * kWarpSize + running.warp->order[turn_];
  } else {
    next = EndOfPass();
  }
  if (next == thread) return;
  if (next < 0) {
    SwitchFiber(fibers_[thread], host_);
    std::abort();
  }
  running.thread = next;
  running.lane = next % kWarpSize;
  threadIdx = indices_[next];
  SwitchFiber(fibers_[thread], fibers_[next]);
}

// The thread that goes on; -1 when the block is done.
int Engine::EndOfPass() {
  Warp& warp = warps_[warp_];
  CheckSameStop(warp);
  const Stop stop = warp.stops[0];
  if (stop == Stop::kEnded) {
    warp.ended = true;
    ++ended_;
  } else if (IsOfBlock(stop)) {
    warp.at_barrier = true;
    if (waiting_ > 0 && barrier_ != stop) {
      Fail(std::string(NameOf(stop)) + ", others of its block wait " +
           (NameOf(barrier_) + strlen("waits ")));
    }
    barrier_ = stop;
    ++waiting_;
  } else {
    warp.generation ^= 1;
    warp.votes[warp.generation] = 0;
  }
  const int next = NextWarp(!warp.at_barrier && !warp.ended);
  return next < 0 ? -1 : StartOfPass(next);
}

int Engine::StartOfPass(int warp) {
  warp_ = warp;
  turn_ = 0;
  running.warp = &warps_[warp];
  running.lane = running.warp->order[0];
  running.thread = warp * kWarpSize + running.lane;
  threadIdx = indices_[running.thread];
  return running.thread;
}

int Engine::NextWarp(bool may_stay) {
  if (may_stay && (CurrentOptions().order != Order::kRandom || random_.Next() % 2 == 0)) {
    return warp_;
  }
  if (CurrentOptions().order == Order::kRandom && num_warps_ > 1) {
    random_.Shuffle(warp_order_.data(), num_warps_);
  }
  const int next = FirstRunnable();
  if (next >= 0) return next;
  if (waiting_ == 0) return -1;
  if (ended_ > 0) FailBarrier();
  ReleaseBarrier();
  return warp_order_[0];
}

int Engine::FirstRunnable() const {
  for (const int warp : warp_order_) {
    if (!warps_[warp].at_barrier && !warps_[warp].ended) return warp;
  }
  return -1;
}

void Engine::ReleaseBarrier() {
  for (int i = 0; i < num_warps_; ++i) warps_[i].at_barrier = false;
  waiting_ = 0;
  barrier_generation_ ^= 1;
  reduced_[barrier_generation_] = {0, 1, 0};
}

void Engine::CheckSameStop(const Warp& warp) {
  for (int lane = 1; lane < warp.lanes; ++lane) {
    if (warp.stops[lane] == warp.stops[0]) continue;
    // The message names a thread that has ended rather than one that waits.
    const int thread = warp_ * kWarpSize + (warp.stops[0] == Stop::kEnded ? 0 : lane);
    const int other = warp_ * kWarpSize + (warp.stops[0] == Stop::kEnded ? lane : 0);
    running.thread = thread;
    Fail(std::string(NameOf(warp.stops[thread % kWarpSize])) + ", but " + Where(other) + " " +
         NameOf(warp.stops[other % kWarpSize]) + ": lanes of a warp diverge");
  }
}

void Engine::FailBarrier() {
  for (int i = 0; i < num_warps_; ++i) {
    if (!warps_[i].ended) continue;
    running.thread = i * kWarpSize;
    Fail(std::string("has ended, but others of its block ") +
         (NameOf(barrier_) + strlen("waits ")));
  }
}

std::string Engine::Where(int thread) const {
  const uint3& index = indices_[thread];
  return "thread " + std::to_string(index.x) + "," + std::to_string(index.y) + "," +
         std::to_string(index.z);
}

void Engine::Fail(const std::string& message) {
  const int thread = running.thread;
  failure_ = "kernel " + FunctionName(launch_->kernel) + ", block " + std::to_string(blockIdx.x) +
             "," + std::to_string(blockIdx.y) + "," + std::to_string(blockIdx.z) + ", " +
             Where(thread) + ": " + message;
  throw Failed();
}

int Engine::Reduce(Stop stop, int value) {
  auto& reduced = reduced_[barrier_generation_];
  reduced.count += value != 0 ? 1 : 0;
  reduced.all &= value != 0 ? 1 : 0;
  reduced.any |= value != 0 ? 1 : 0;
  StopAt(stop);
  if (stop == Stop::kSyncThreadsCount) return reduced.count;
  return stop == Stop::kSyncThreadsAnd ? reduced.all : reduced.any;
}

}  // namespace

void StopAt(Stop stop) { TheEngine().StopAt(stop); }
int BlockReduce(Stop stop, int value) { return TheEngine().Reduce(stop, value); }
std::byte* SharedArena() { return TheEngine().arena(); }
std::string RunKernel(const Launch& launch) { return TheEngine().Run(launch); }

void FailKernel(const std::string& message) {
  if (running.warp == nullptr) {
    std::fprintf(stderr, "cuda_shim: outside a kernel: %s\n", message.c_str());
    std::abort();
  }
  TheEngine().Fail(message);
}

void CheckMask(unsigned mask) {
  if (mask == 0xffffffffu && running.warp->lanes == kWarpSize) return;
  if (running.warp->lanes != kWarpSize) {
    FailKernel("a warp function in a warp of " + std::to_string(running.warp->lanes) + " lanes");
  }
  FailKernel("a warp function with a mask other than 0xffffffff");
}

}  // namespace heavywater::cuda_shim
