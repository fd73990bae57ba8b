// Stacks that take turns: one per CUDA thread of the running block.
#pragma once

#include <cstddef>

namespace heavywater::cuda_shim {

// A place where execution stands. The first one of a host thread is made by
// switching away from it.
struct Fiber {
  void* state = nullptr;  // where its registers are saved
  std::byte* stack = nullptr;
  size_t stack_bytes = 0;
  void* sanitizer = nullptr;  // asan's fake stack, tsan's fiber
};

// Gives the fiber a stack of its own, kept for later runs. Ends the process when
// the host has no memory.
void CreateFiber(Fiber& fiber);
// It will begin with entry(), which must never return.
void ResetFiber(Fiber& fiber, void (*entry)());
// Call first in entry().
void FiberEntered();
void SwitchFiber(Fiber& from, Fiber& to);
// Forgets what abandoned fibers left on their stacks (asan).
void ForgetStack(Fiber& fiber);

}  // namespace heavywater::cuda_shim
