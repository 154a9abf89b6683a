# A small C++ rank, which needs the lowest two rooms only.
add_executable(lockstep_comm_rank comm_rank.cpp)
lockstep_configure(lockstep_comm_rank LIBTORCH)
target_link_libraries(lockstep_comm_rank PRIVATE lockstep_comm lockstep_base)
set_target_properties(lockstep_comm_rank PROPERTIES RUNTIME_OUTPUT_DIRECTORY
                                                    ${PROJECT_BINARY_DIR}/tests)
lockstep_script_test(interop.comm FILE comm_test.py LABEL interop TIMEOUT 400)
