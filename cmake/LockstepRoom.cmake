# lockstep_room(NAME [LIBTORCH] [ROOMS room...] [LIBS target...] SOURCES file... [TESTS file...])
#
# One room of the library: an object library lockstep_NAME, and, with TESTS, one
# GoogleTest binary lockstep_NAME_test that links this room and all that it may
# include (ROOMS names every room below it, not only the next one). A room without
# LIBTORCH knows nothing of it.
function(lockstep_room name)
  cmake_parse_arguments(ROOM "LIBTORCH" "" "ROOMS;LIBS;SOURCES;TESTS" ${ARGN})
  set(target lockstep_${name})
  set(libtorch "")
  if(ROOM_LIBTORCH)
    set(libtorch LIBTORCH)
  endif()
  add_library(${target} OBJECT ${ROOM_SOURCES})
  lockstep_configure(${target} ${libtorch})
  target_link_libraries(${target} PUBLIC ${ROOM_LIBS})
  list(TRANSFORM ROOM_ROOMS PREPEND lockstep_ OUTPUT_VARIABLE below)
  target_link_libraries(${target} PUBLIC ${below})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_ROOMS ${name})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_ROOM_LIBS ${ROOM_LIBS})
  if(ROOM_TESTS AND LOCKSTEP_BUILD_TESTS)
    lockstep_test(${target}_test ${libtorch} LABEL ${name} ROOMS ${name} ${ROOM_ROOMS}
                  SOURCES ${ROOM_TESTS})
  endif()
endfunction()

# lockstep_test(TARGET [LIBTORCH] LABEL label ROOMS room... SOURCES file...)
# A GoogleTest binary; each of its tests becomes one ctest test, so that one crash is
# one failure.
function(lockstep_test target)
  cmake_parse_arguments(T "LIBTORCH" "LABEL" "ROOMS;SOURCES" ${ARGN})
  add_executable(${target} ${T_SOURCES})
  if(T_LIBTORCH)
    lockstep_configure(${target} LIBTORCH)
  else()
    lockstep_configure(${target})
  endif()
  # What a test tests is optimised fully; the test itself need not be, and compiles in less time.
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  list(TRANSFORM T_ROOMS PREPEND lockstep_)
  target_link_libraries(${target} PRIVATE ${T_ROOMS} GTest::gmock GTest::gtest_main)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  gtest_discover_tests(
    ${target}
    TEST_PREFIX "${T_LABEL}."
    DISCOVERY_TIMEOUT 120
    PROPERTIES TIMEOUT 120 LABELS ${T_LABEL})
endfunction()

# lockstep_configure(TARGET [LIBTORCH]): what every target of ours has, precompiled headers included.
function(lockstep_configure target)
  lockstep_compile_settings(${target} ${ARGN})
  # The sources and their properties are complete only at the end of the folder.
  cmake_language(EVAL CODE "cmake_language(DEFER CALL lockstep_precompile [[${target}]])")
endfunction()

# The compile settings every target of ours shares. -fPIC is given by hand and CMake's
# own -fPIE kept off, because a precompiled header serves only files compiled alike.
function(lockstep_compile_settings target)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE -fPIC -Wall -Wextra -Wno-unused-parameter)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF CXX_EXTENSIONS OFF)
  target_link_libraries(${target} PUBLIC Threads::Threads)
  if("LIBTORCH" IN_LIST ARGN)
    target_link_libraries(${target} PUBLIC LibTorch::torch)
    if(NOT LibTorch_HAS_GLOO_HEADERS)
      target_include_directories(${target} SYSTEM PRIVATE ${PROJECT_SOURCE_DIR}/cmake/gloo_stubs)
    endif()
  endif()
endfunction()
