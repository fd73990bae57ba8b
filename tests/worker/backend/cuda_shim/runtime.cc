// Devices, errors, options and launches.
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "cuda_shim.h"
#include "cuda_shim_memory.h"
#include "runtime_api.h"
#include "streams.h"

namespace heavywater::cuda_shim {

Counters counters;

namespace {

// As sm_90 has it.
constexpr int kDefaultShared = 48 * 1024;
constexpr int kMostShared = 227 * 1024;

struct Runtime {
  Options options;
  std::string failure;
  cudaError_t last_error = cudaSuccess;
  std::map<const void*, int> shared_limits;
};
Runtime& TheRuntime() {
  static auto* runtime = new Runtime;
  return *runtime;
}
thread_local int current_device = 0;

bool IsValidDim(const dim3& dim, uint64_t x, uint64_t y, uint64_t z) {
  return dim.x >= 1 && dim.y >= 1 && dim.z >= 1 && dim.x <= x && dim.y <= y && dim.z <= z;
}

cudaError_t CheckLimits(const cudaLaunchConfig_t& config, const void* kernel) {
  const dim3& block = config.blockDim;
  if (!IsValidDim(config.gridDim, 2147483647, 65535, 65535) || !IsValidDim(block, 1024, 1024, 64) ||
      uint64_t{block.x} * block.y * block.z > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  const auto limit = TheRuntime().shared_limits.find(kernel);
  const int shared = limit == TheRuntime().shared_limits.end() ? kDefaultShared : limit->second;
  return config.dynamicSmemBytes > static_cast<size_t>(shared) ? cudaErrorInvalidValue
                                                               : cudaSuccess;
}

}  // namespace

const Options& CurrentOptions() { return TheRuntime().options; }
void SetOptions(const Options& options) {
  const RuntimeLock lock;
  FinishAll();
  TheRuntime().options = options;
}
Counters ReadCounters() { return counters; }
void ResetCounters() { counters = {}; }
int64_t AllocatedBytes() { return DeviceBytesAllocated(); }
std::string DamagedGuards() {
  const RuntimeLock lock;
  return FindDamage();
}

std::string TakeFailure() {
  const RuntimeLock lock;
  SetStickyError(cudaSuccess);
  TheRuntime().last_error = cudaSuccess;
  return std::exchange(TheRuntime().failure, {});
}

// Remembers what failed, and says it: a test that only sees an error code would not
// tell where.
cudaError_t ReportFailure(std::string failure) {
  std::fprintf(stderr, "cuda_shim: %s\n", failure.c_str());
  TheRuntime().failure = std::move(failure);
  return cudaErrorLaunchFailure;
}

cudaError_t EnqueueLaunch(const cudaLaunchConfig_t& config, const void* kernel,
                          std::function<void()> body) {
  const RuntimeLock lock;
  if (const cudaError_t error = CheckLimits(config, kernel); error != cudaSuccess) {
    TheRuntime().last_error = error;
    return error;
  }
  if (CurrentOptions().on_launch) {
    CurrentOptions().on_launch(
        {.kernel = FunctionName(kernel),
         .threads = static_cast<int>(config.blockDim.x * config.blockDim.y * config.blockDim.z),
         .shared_bytes = static_cast<int64_t>(config.dynamicSmemBytes)});
  }
  Launch launch{.kernel = kernel,
                .grid = config.gridDim,
                .block = config.blockDim,
                .shared_bytes = config.dynamicSmemBytes,
                .body = std::move(body)};
  return Enqueue(config.stream, [launch = std::move(launch)] {
    ++counters.launches;
    std::string failure = RunKernel(launch);
    return failure.empty() ? cudaSuccess : ReportFailure(std::move(failure));
  });
}

}  // namespace heavywater::cuda_shim

using heavywater::cuda_shim::CurrentOptions;
using heavywater::cuda_shim::RuntimeLock;
using heavywater::cuda_shim::TheRuntime;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    default:
      return "cudaError";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorLaunchFailure && !TheRuntime().failure.empty()) {
    return TheRuntime().failure.c_str();
  }
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return cudaGetErrorName(error);
}
cudaError_t cudaGetLastError() {
  const RuntimeLock lock;
  const cudaError_t sticky = heavywater::cuda_shim::StickyError();
  if (sticky != cudaSuccess) return sticky;
  return std::exchange(TheRuntime().last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  const RuntimeLock lock;
  const cudaError_t sticky = heavywater::cuda_shim::StickyError();
  return sticky != cudaSuccess ? sticky : TheRuntime().last_error;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = CurrentOptions().num_devices;
  return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = heavywater::cuda_shim::current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= CurrentOptions().num_devices) return cudaErrorInvalidDevice;
  heavywater::cuda_shim::current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= CurrentOptions().num_devices) return cudaErrorInvalidDevice;
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "host shim");
  properties->totalGlobalMem = CurrentOptions().device_memory_bytes;
  properties->sharedMemPerBlock = heavywater::cuda_shim::kDefaultShared;
  properties->sharedMemPerBlockOptin = heavywater::cuda_shim::kMostShared;
  properties->sharedMemPerMultiprocessor = 228 * 1024;
  // Few, so that what is split over them is split in tests, too.
  properties->multiProcessorCount = 4;
  properties->major = 9;
  properties->minor = 0;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->l2CacheSize = 50 << 20;
  properties->canUseHostPointerForRegisteredMem = 1;
  properties->unifiedAddressing = 1;
  properties->pciBusID = device;
  properties->uuid.bytes[15] = static_cast<char>(device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device);
      error != cudaSuccess) {
    return error;
  }
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
      return cudaSuccess;
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *value = properties.canUseHostPointerForRegisteredMem;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}
cudaError_t cudaDeviceSynchronize() {
  const RuntimeLock lock;
  return heavywater::cuda_shim::FinishAll();
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const RuntimeLock lock;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > heavywater::cuda_shim::kMostShared) return cudaErrorInvalidValue;
  TheRuntime().shared_limits[function] = value;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const RuntimeLock lock;
  return heavywater::cuda_shim::Enqueue(stream, [function, data] {
    function(data);
    return cudaSuccess;
  });
}
