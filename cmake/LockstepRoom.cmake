# lockstep_room(NAME [LIBTORCH] [ROOMS room...] [LIBS target...] SOURCES file... [HEADERS file...]
#               [TESTS file... [TEST_ROOMS room...]])
#
# One room of the library: an object library lockstep_NAME, and, with TESTS, one GoogleTest binary
# lockstep_NAME_test. ROOMS names the rooms whose headers its files may include: this is the one
# source of that rule, which tests/install/test_layering.py reads from rooms.json of the build
# folder. What those rooms need themselves is linked too. A room without LIBTORCH knows nothing of
# it. HEADERS are the public headers: those and no others are installed. TEST_ROOMS are what the tests
# may include beside.
function(lockstep_room name)
  cmake_parse_arguments(ROOM "LIBTORCH" "" "ROOMS;LIBS;SOURCES;HEADERS;TESTS;TEST_ROOMS" ${ARGN})
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
  set_property(GLOBAL PROPERTY LOCKSTEP_MAY_INCLUDE_${name} "${ROOM_ROOMS}")
  set_property(GLOBAL PROPERTY LOCKSTEP_TESTS_MAY_INCLUDE_${name} "${ROOM_TEST_ROOMS}")
  foreach(kind SOURCES HEADERS TESTS)
    set(files "")
    foreach(file IN LISTS ROOM_${kind})
      cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE)
      cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
      list(APPEND files ${file})
    endforeach()
    set_property(GLOBAL PROPERTY LOCKSTEP_${kind}_OF_${name} "${files}")
  endforeach()
  if(ROOM_TESTS AND LOCKSTEP_BUILD_TESTS)
    lockstep_test(${target}_test ${libtorch} LABEL ${name} ROOMS ${name} ${ROOM_TEST_ROOMS}
                  SOURCES ${ROOM_TESTS})
  endif()
endfunction()

# lockstep_link_rooms(TARGET room...): the rooms and all that they need. CMake hands an object
# library's objects only to a target that links it directly. Done when all rooms are known.
function(lockstep_link_rooms target)
  list(JOIN ARGN " " rooms)
  cmake_language(EVAL CODE "cmake_language(DEFER DIRECTORY [[${PROJECT_SOURCE_DIR}]]
                                           CALL lockstep_link_known_rooms [[${target}]] ${rooms})")
endfunction()

function(lockstep_link_known_rooms target)
  set(needed "")
  set(open ${ARGN})
  while(open)
    list(POP_FRONT open room)
    if(NOT room IN_LIST needed)
      list(APPEND needed ${room})
      get_property(below GLOBAL PROPERTY LOCKSTEP_MAY_INCLUDE_${room})
      list(APPEND open ${below})
    endif()
  endwhile()
  list(TRANSFORM needed PREPEND lockstep_)
  target_link_libraries(${target} PRIVATE ${needed})
endfunction()

# Writes rooms.json: each room's folder-relative sources and public headers, and what it may include.
function(lockstep_write_rooms)
  get_property(rooms GLOBAL PROPERTY LOCKSTEP_ROOMS)
  set(entries "")
  foreach(room IN LISTS rooms)
    set(fields "")
    foreach(field "sources SOURCES_OF" "headers HEADERS_OF" "tests TESTS_OF"
                  "may_include MAY_INCLUDE" "tests_may_include TESTS_MAY_INCLUDE")
      separate_arguments(field)
      list(GET field 0 key)
      list(GET field 1 property)
      get_property(values GLOBAL PROPERTY LOCKSTEP_${property}_${room})
      list(TRANSFORM values REPLACE "(.+)" "\"\\1\"")
      list(JOIN values ", " values)
      list(APPEND fields "\"${key}\": [${values}]")
    endforeach()
    list(JOIN fields ", " fields)
    list(APPEND entries "  \"${room}\": {${fields}}")
  endforeach()
  list(JOIN entries ",\n" entries)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/rooms.json CONTENT "{\n${entries}\n}\n" @ONLY)
endfunction()

# lockstep_test(TARGET [LIBTORCH] LABEL label ROOMS room... SOURCES file...)
# A GoogleTest binary; each of its suites becomes one ctest test (see LockstepTestSuites.cmake), so
# that a crash costs one suite.
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
  lockstep_link_rooms(${target} ${T_ROOMS})
  target_link_libraries(${target} PRIVATE GTest::gmock GTest::gtest_main ZLIB::ZLIB)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  set(suites ${CMAKE_CURRENT_BINARY_DIR}/${target}_suites.cmake)
  add_custom_command(
    TARGET ${target}
    POST_BUILD
    COMMAND ${CMAKE_COMMAND} -D BINARY=$<TARGET_FILE:${target}> -D OUTPUT=${suites} -D LABEL=${T_LABEL} -D
            TIMEOUT=600 -P ${PROJECT_SOURCE_DIR}/cmake/LockstepTestSuites.cmake
    BYPRODUCTS ${suites}
    VERBATIM)
  # ctest in a folder that is not built yet says so by this test's failure.
  file(GENERATE OUTPUT ${suites}.in.cmake
       CONTENT "if(EXISTS [==[${suites}]==])\n  include([==[${suites}]==])\nelse()\n  add_test(${target}_NOT_BUILT ${target}_NOT_BUILT)\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${suites}.in.cmake)
endfunction()

# lockstep_rank_program(TARGET SOURCE room...): a program that a test script starts as a rank.
function(lockstep_rank_program target source)
  add_executable(${target} ${source})
  lockstep_configure(${target} LIBTORCH)
  lockstep_link_rooms(${target} ${ARGN})
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
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
