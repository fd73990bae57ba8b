#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__x86_64__)
// void hw_shim_switch(void** save, void* load): saves what a call keeps, and goes on
// where `load` was saved. A system call for the signal mask, as swapcontext makes,
// would cost more than a kernel's work between two switches.
asm(R"(
.text
.globl hw_shim_switch
.type hw_shim_switch, @function
hw_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hw_shim_switch, .-hw_shim_switch
)");
extern "C" void hw_shim_switch(void** save, void* load);
#endif

namespace heavywater::cuda_shim {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

#if defined(__SANITIZE_ADDRESS__)
Fiber* switched_from = nullptr;
#endif

}  // namespace

void CreateFiber(Fiber& fiber) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  // The page below catches what grows too far.
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    std::perror("cuda_shim: stack of a thread");
    std::abort();
  }
  fiber.stack = static_cast<std::byte*>(memory) + page;
  fiber.stack_bytes = kStackBytes;
#if defined(__SANITIZE_THREAD__)
  fiber.sanitizer = __tsan_create_fiber(0);
#endif
}

#if defined(__x86_64__)

void ResetFiber(Fiber& fiber, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  // The last run's outermost frame was never left.
  __asan_unpoison_memory_region(fiber.stack + fiber.stack_bytes - 1024, 1024);
#endif
  auto** top = reinterpret_cast<void**>(fiber.stack + fiber.stack_bytes);
  // Six registers, the address to return to, and one word so that the stack is
  // aligned as after a call.
  void** state = top - 8;
  for (int i = 0; i < 8; ++i) state[i] = nullptr;
  state[6] = reinterpret_cast<void*>(entry);
  fiber.state = state;
#if defined(__SANITIZE_ADDRESS__)
  fiber.sanitizer = nullptr;
#endif
}

#else

void ResetFiber(Fiber& fiber, void (*entry)()) {
  // The context itself lies at the stack's lower end.
  auto* context = reinterpret_cast<ucontext_t*>(fiber.stack);
  getcontext(context);
  context->uc_stack.ss_sp = fiber.stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = fiber.stack_bytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  fiber.state = context;
#if defined(__SANITIZE_ADDRESS__)
  fiber.sanitizer = nullptr;
#endif
}

#endif

void SwitchFiber(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  switched_from = &from;
  __sanitizer_start_switch_fiber(&from.sanitizer, to.stack, to.stack_bytes);
#elif defined(__SANITIZE_THREAD__)
  if (from.sanitizer == nullptr) from.sanitizer = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.sanitizer, 0);
#endif
#if defined(__x86_64__)
  hw_shim_switch(&from.state, to.state);
#else
  static ucontext_t host;
  if (from.state == nullptr) from.state = &host;
  swapcontext(static_cast<ucontext_t*>(from.state), static_cast<ucontext_t*>(to.state));
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
#endif
}

void FiberEntered() {
#if defined(__SANITIZE_ADDRESS__)
  // The first switch away from a host thread tells where its stack lies.
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (switched_from->stack == nullptr) {
    switched_from->stack = static_cast<std::byte*>(const_cast<void*>(bottom));
    switched_from->stack_bytes = bytes;
  }
#endif
}

void ForgetStack(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
#endif
}

}  // namespace heavywater::cuda_shim
