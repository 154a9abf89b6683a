# Run as a script after a GoogleTest binary was linked: writes what tells ctest its suites.
#   cmake -D BINARY=file -D OUTPUT=file -D LABEL=label -D TIMEOUT=seconds -P LockstepTestSuites.cmake
# One ctest test runs one suite, in one process: to load LibTorch for each case alone would take a
# third of a second of a processor each, longer than most cases take.
execute_process(
  COMMAND ${BINARY} --gtest_list_tests
  OUTPUT_VARIABLE listing
  ERROR_VARIABLE complaints
  RESULT_VARIABLE status
  TIMEOUT 120)
if(NOT status EQUAL 0)
  file(REMOVE ${BINARY}) # So that the next build links it, and asks, again.
  message(FATAL_ERROR "${BINARY} --gtest_list_tests ended with ${status}:\n${listing}${complaints}")
endif()

# Where ranks write their last calls when a test lets them fail.
get_filename_component(traces ${BINARY} DIRECTORY)
string(APPEND traces "/traces/rank_")
set(lines "")
string(REGEX MATCHALL "(^|\n)[A-Za-z_][A-Za-z0-9_/]*\\." suites "${listing}")
foreach(suite IN LISTS suites)
  string(REGEX REPLACE "[\n.]" "" suite "${suite}")
  set(test "${LABEL}.${suite}")
  string(APPEND lines "add_test([==[${test}]==] [==[${BINARY}]==] [==[--gtest_filter=${suite}.*]==])\n")
  # A suite counts as skipped when none of its cases could run; then its output says why.
  string(APPEND lines "set_tests_properties([==[${test}]==] PROPERTIES TIMEOUT ${TIMEOUT} LABELS [==[${LABEL}]==]"
                      " ENVIRONMENT [==[TORCH_FR_DUMP_TEMP_FILE=${traces}]==]"
                      " SKIP_REGULAR_EXPRESSION [==[PASSED  . 0 tests\\.[\n].  SKIPPED . [0-9]+ tests?, listed below:[^F]*$]==])\n")
endforeach()
if(lines STREQUAL "")
  message(FATAL_ERROR "${BINARY} has no test")
endif()
file(WRITE ${OUTPUT} "${lines}")
