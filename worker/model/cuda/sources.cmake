# The CUDA runner's sources: worker/model compiles them for the device, the tests for the
# host shim. cuBLAS is only the device's.
set(HEAVYWATER_CUDA_MODEL_SOURCES cuda_llama_runner.cc device_weights.cc)
set(HEAVYWATER_CUDA_MODEL_KERNELS llama_kernels.cu)
set(HEAVYWATER_CUDA_MODEL_HEADERS cuda_llama_runner.h device_matmul.h device_weights.h llama_kernels.h)
foreach(list HEAVYWATER_CUDA_MODEL_SOURCES HEAVYWATER_CUDA_MODEL_KERNELS HEAVYWATER_CUDA_MODEL_HEADERS)
  list(TRANSFORM ${list} PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
endforeach()
