# ZeRO and Join against Python's, to the bit.
lockstep_rank_program(lockstep_zero_parity zero_parity.cpp zero parallel optim models data)
lockstep_script_test(interop.zero_parity FILE test_zero_parity.py LABEL interop TIMEOUT 400)
