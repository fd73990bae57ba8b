# cmake -DNM=nm -DWORKER=heavywater-worker -P this: fails unless the binary has CUDA's runtime
# within it and takes NCCL from its library.
execute_process(COMMAND ${NM} ${WORKER} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
if(NOT symbols MATCHES " [tT] cudaLaunchKernelExC")
  message(FATAL_ERROR "${WORKER} has no CUDA runtime")
endif()
if(NOT symbols MATCHES " U ncclCommInitRankConfig")
  message(FATAL_ERROR "${WORKER} does not call NCCL")
endif()
