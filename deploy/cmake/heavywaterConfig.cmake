# find_package(heavywater COMPONENTS worker client): heavywater::worker is the library
# in-process (worker/rank/attention_engine.h), heavywater::client the gRPC client
# (client/cpp). Without COMPONENTS: those that are installed.
include(CMakeFindDependencyMacro)

find_dependency(Threads)
find_dependency(absl)
include(${CMAKE_CURRENT_LIST_DIR}/heavywater-base.cmake)

set(_heavywater_components ${heavywater_FIND_COMPONENTS})
if(NOT _heavywater_components)
  foreach(_component worker client)
    if(EXISTS ${CMAKE_CURRENT_LIST_DIR}/heavywater-${_component}.cmake)
      list(APPEND _heavywater_components ${_component})
    endif()
  endforeach()
endif()

foreach(_component ${_heavywater_components})
  if(NOT _component MATCHES "^(worker|client)$" OR
     NOT EXISTS ${CMAKE_CURRENT_LIST_DIR}/heavywater-${_component}.cmake)
    set(heavywater_${_component}_FOUND FALSE)
    if(heavywater_FIND_REQUIRED_${_component})
      set(heavywater_FOUND FALSE)
      set(heavywater_NOT_FOUND_MESSAGE
          "heavywater has no component ${_component} here, want worker or client, as installed")
    endif()
    continue()
  endif()
  if(_component STREQUAL "worker")
    find_package(HWY QUIET)
    if(NOT TARGET hwy::hwy)
      find_dependency(PkgConfig)
      pkg_check_modules(HWY REQUIRED QUIET IMPORTED_TARGET libhwy)
      add_library(hwy::hwy ALIAS PkgConfig::HWY)
    endif()
  else()
    find_dependency(Protobuf)
    find_dependency(gRPC)
    find_dependency(OpenSSL)
  endif()
  include(${CMAKE_CURRENT_LIST_DIR}/heavywater-${_component}.cmake)
  set(heavywater_${_component}_FOUND TRUE)
endforeach()
