# Sampler, transforms and loader against Python's torch.
add_executable(data_probe data_probe.cpp)
lockstep_configure(data_probe LIBTORCH)
target_link_libraries(data_probe PRIVATE lockstep_data lockstep_comm lockstep_base)
set_target_properties(data_probe PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
lockstep_script_test(interop.data FILE data_test.py LABEL interop)
