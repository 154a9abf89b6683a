# Data files that Python writes and Lockstep reads, and the other way round.
add_executable(data_files_tool data_files_tool.cpp)
lockstep_configure(data_files_tool LIBTORCH)
target_link_libraries(data_files_tool PRIVATE lockstep_data lockstep_comm lockstep_base)
set_target_properties(data_files_tool PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
lockstep_script_test(interop.data_files FILE data_files_test.py LABEL interop)
