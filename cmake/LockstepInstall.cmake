# `cmake --install` gives a package: the libraries, their headers, the binary, and what
# find_package(Lockstep) needs. Each component has an export of its own.
include(CMakePackageConfigHelpers)
set(lockstep_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)

function(lockstep_install_library target export)
  install(
    TARGETS ${target}
    EXPORT ${export}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(
    EXPORT ${export}
    NAMESPACE Lockstep::
    DESTINATION ${lockstep_cmake_dir})
endfunction()
lockstep_install_library(lockstep LockstepTargets)
lockstep_install_library(lockstep_rpc_library LockstepRpcTargets)
install(FILES lockstep/lockstep.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
get_property(rooms GLOBAL PROPERTY LOCKSTEP_ROOMS)
foreach(room IN LISTS rooms)
  get_property(headers GLOBAL PROPERTY LOCKSTEP_HEADERS_OF_${room})
  foreach(header IN LISTS headers)
    cmake_path(GET header PARENT_PATH folder)
    install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
  endforeach()
endforeach()
if(LOCKSTEP_BUILD_TOOLS)
  install(TARGETS lockstep_bin RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(TARGETS lockstep_cli lockstep_bench lockstep_hosts LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(CODE "
    foreach(place bash-completion/completions/lockstep fish/vendor_completions.d/lockstep.fish)
      string(REGEX MATCH ^[a-z]+ shell \${place})
      set(file \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DATADIR}/\${place})
      cmake_path(GET file PARENT_PATH folder)
      file(MAKE_DIRECTORY \${folder})
      execute_process(COMMAND $<TARGET_FILE:lockstep_bin> completion \${shell} OUTPUT_FILE \${file})
    endforeach()")
  string(TIMESTAMP date "%Y-%m-%d" UTC)
  install(CODE "
    set(folder \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_MANDIR}/man1)
    file(MAKE_DIRECTORY \${folder})
    foreach(page lockstep lockstep-train lockstep-eval lockstep-run lockstep-bench lockstep-estimate-memory
            lockstep-checkpoint lockstep-debug lockstep-env lockstep-completion)
      string(REGEX REPLACE ^lockstep-? \"\" command \${page})
      execute_process(COMMAND $<TARGET_FILE:lockstep_bin> \${command} --man-page=${PROJECT_VERSION},${date}
                      OUTPUT_FILE \${folder}/\${page}.1)
    endforeach()")
endif()

set(lockstep_torch "${LibTorch_ROOT}")
if(LOCKSTEP_BUILD_WHEEL)
  set(lockstep_torch "\${PACKAGE_PREFIX_DIR}/../torch")
  set(LOCKSTEP_HAS_MPI OFF) # The shared library has found them.
  set(LOCKSTEP_HAS_PROMETHEUS OFF)
endif()
configure_package_config_file(cmake/LockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/LockstepConfig.cmake
                              INSTALL_DESTINATION ${lockstep_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/LockstepConfig.cmake
              ${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake cmake/FindLibTorch.cmake
              cmake/FindISAL.cmake
        DESTINATION ${lockstep_cmake_dir})
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
