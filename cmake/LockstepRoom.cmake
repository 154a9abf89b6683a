# lockstep_room(NAME [PCH none|aten|torch] [ROOMS room...] [LIBS target...]
#               SOURCES file... [TESTS file...])
#
# One room of the library: an object library lockstep_NAME, and, with TESTS, one
# GoogleTest binary lockstep_NAME_test that links this room and all that it may
# include (ROOMS names every room below it, not only the next one). PCH says which
# shared precompiled header the room's files get: `none` for rooms that know nothing
# of LibTorch, `aten` for tensors only, `torch` for modules, autograd and c10d.
function(lockstep_room name)
  cmake_parse_arguments(ROOM "" "PCH" "ROOMS;LIBS;SOURCES;TESTS" ${ARGN})
  set(target lockstep_${name})
  add_library(${target} OBJECT ${ROOM_SOURCES})
  lockstep_configure(${target} "${ROOM_PCH}")
  target_link_libraries(${target} PUBLIC ${ROOM_LIBS})
  list(TRANSFORM ROOM_ROOMS PREPEND lockstep_ OUTPUT_VARIABLE below)
  target_link_libraries(${target} PUBLIC ${below})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_ROOMS ${name})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_ROOM_LIBS ${ROOM_LIBS})
  if(ROOM_TESTS AND LOCKSTEP_BUILD_TESTS)
    lockstep_test(${target}_test LABEL ${name} PCH ${ROOM_PCH} ROOMS ${name} ${ROOM_ROOMS}
                  SOURCES ${ROOM_TESTS})
  endif()
endfunction()

# lockstep_test(TARGET LABEL label [PCH ...] ROOMS room... SOURCES file...)
# A GoogleTest binary; each of its tests becomes one ctest test, so that one crash is
# one failure.
function(lockstep_test target)
  cmake_parse_arguments(T "" "PCH;LABEL" "ROOMS;SOURCES" ${ARGN})
  add_executable(${target} ${T_SOURCES})
  lockstep_configure(${target} "${T_PCH}")
  list(TRANSFORM T_ROOMS PREPEND lockstep_)
  target_link_libraries(${target} PRIVATE ${T_ROOMS} GTest::gmock GTest::gtest_main)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  gtest_discover_tests(
    ${target}
    TEST_PREFIX "${T_LABEL}."
    DISCOVERY_TIMEOUT 120
    PROPERTIES TIMEOUT 120 LABELS ${T_LABEL})
endfunction()

# The compile settings every target of ours shares. -fPIC is given by hand and CMake's
# own -fPIE kept off, because a precompiled header serves only files compiled alike.
function(lockstep_configure target pch)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE -fPIC -Wall -Wextra -Wno-unused-parameter)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF CXX_EXTENSIONS OFF)
  target_link_libraries(${target} PUBLIC Threads::Threads)
  if(pch STREQUAL "aten" OR pch STREQUAL "torch")
    target_link_libraries(${target} PUBLIC LibTorch::torch)
    if(NOT LibTorch_HAS_GLOO_HEADERS)
      target_include_directories(${target} SYSTEM PRIVATE ${PROJECT_SOURCE_DIR}/cmake/gloo_stubs)
    endif()
    if(NOT "${target}" STREQUAL "lockstep_pch_${pch}")
      target_precompile_headers(${target} REUSE_FROM lockstep_pch_${pch})
    endif()
  endif()
endfunction()
