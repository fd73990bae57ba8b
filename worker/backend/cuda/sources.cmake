# The CUDA backend's sources: worker/backend compiles them for the device, the tests for
# the host shim.
set(HEAVYWATER_CUDA_SOURCES
  attention.cc context.cc copies.cc cuda_backend.cc cuda_check.cc faults.cc host_results.cc
  ledger.cc recall.cc recall_report.cc rotate.cc select.cc sketches.cc slots.cc staging_ring.cc
  write_through.cc)
set(HEAVYWATER_CUDA_KERNELS
  append.cu attend_merge.cu attend_splits.cu attend_whole.cu gather.cu ledger.cu picks.cu picks_attend.cu
  picks_report.cu prompt_attend.cu prompt_gains.cu rotate.cu scan.cu scan_missing.cu select.cu
  sketch_channels.cu sketch_encode.cu victims.cu)
set(HEAVYWATER_CUDA_HEADERS
  attend.h attend_block.h attend_parts.h attention.h block_sum.h context.h copies.h cuda_backend.h cuda_check.h
  device_code.h fault.h faults.h gain.h host_results.h kv_row.h launch.h ledger.h ledger_kernels.h mma.h
  picks_select.h prompt_dispatch.h prompt_pass.h prompt_tile_fma.h prompt_tile_mma.h recall.h
  recall_report.h recall_wave.h records.h rotate.h rotate_kernels.h row_pack.h scan_block.h scan_page.h select.h select_kernels.h
  sketch_exact.h sketch_kernels.h sketch_keys.h sketches.h slot_kernels.h slots.h split_rows.h staging_ring.h
  warp_reduce.h wave_token.h write_through.h)
foreach(list HEAVYWATER_CUDA_SOURCES HEAVYWATER_CUDA_KERNELS HEAVYWATER_CUDA_HEADERS)
  list(TRANSFORM ${list} PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
endforeach()
