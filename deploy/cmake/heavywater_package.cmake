# The installed package: find_package(heavywater COMPONENTS worker client).
#   cmake --install BUILD --prefix PREFIX [--component base|worker|client]
include_guard()
include(GNUInstallDirs)

set(HEAVYWATER_INCLUDE_DIR ${CMAKE_INSTALL_INCLUDEDIR}/heavywater)
set(HEAVYWATER_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/heavywater)

# heavywater_install(COMPONENT target...): libraries and their headers. A target
# belongs to one component; `base` is what the others share.
function(heavywater_install component)
  foreach(target ${ARGN})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "INTERFACE_LIBRARY")
      install(TARGETS ${target} EXPORT heavywater-${component})
    elseif(target STREQUAL "heavywater_proto")
      install(TARGETS ${target} EXPORT heavywater-${component}
              ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${component})
    else()
      install(TARGETS ${target} EXPORT heavywater-${component}
              ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${component}
              FILE_SET HEADERS DESTINATION ${HEAVYWATER_INCLUDE_DIR} COMPONENT ${component}
              FILE_SET headers_alone DESTINATION ${HEAVYWATER_INCLUDE_DIR} COMPONENT ${component})
    endif()
  endforeach()
endfunction()

# Once all targets are there.
function(heavywater_install_package)
  include(CMakePackageConfigHelpers)
  set(components base worker)
  if(HEAVYWATER_SERVERS)
    list(APPEND components client)
  endif()
  foreach(component ${components})
    install(EXPORT heavywater-${component} NAMESPACE heavywater::
            DESTINATION ${HEAVYWATER_PACKAGE_DIR} COMPONENT ${component})
  endforeach()
  write_basic_package_version_file(${CMAKE_BINARY_DIR}/heavywaterConfigVersion.cmake
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_SOURCE_DIR}/deploy/cmake/heavywaterConfig.cmake
                ${CMAKE_BINARY_DIR}/heavywaterConfigVersion.cmake
          DESTINATION ${HEAVYWATER_PACKAGE_DIR} COMPONENT base)
endfunction()
