# Our RPC's results beside those of Python's.
lockstep_rank_program(lockstep_rpc_parity rpc_parity.cpp rpc data)
lockstep_script_test(interop.rpc_parity FILE test_rpc_parity.py LABEL interop TIMEOUT 300 COST 15)
