# Models, optimizers and DistributedDataParallel against Python's, to the bit.
add_executable(lockstep_parity parity.cpp)
lockstep_configure(lockstep_parity LIBTORCH)
target_link_libraries(lockstep_parity PRIVATE lockstep_parallel lockstep_optim lockstep_models
                                              lockstep_data lockstep_comm lockstep_base)
set_target_properties(lockstep_parity PROPERTIES RUNTIME_OUTPUT_DIRECTORY
                                                 ${PROJECT_BINARY_DIR}/tests)
lockstep_script_test(interop.model_parity FILE test_model_parity.py LABEL interop)
lockstep_script_test(interop.optim_parity FILE test_optim_parity.py LABEL interop)
lockstep_script_test(interop.ddp_parity FILE test_ddp_parity.py LABEL interop TIMEOUT 400)
