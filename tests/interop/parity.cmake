# Models, optimizers and DistributedDataParallel against Python's, to the bit.
lockstep_rank_program(lockstep_parity parity.cpp averaging comm_hooks parallel optim autograd models
                      data)
lockstep_script_test(interop.model_parity FILE test_model_parity.py LABEL interop)
lockstep_script_test(interop.optim_parity FILE test_optim_parity.py LABEL interop)
lockstep_script_test(interop.ddp_parity FILE test_ddp_parity.py LABEL interop TIMEOUT 400)
