# A small C++ rank, which needs the lowest two rooms only.
lockstep_rank_program(lockstep_comm_rank comm_rank.cpp comm)
lockstep_script_test(interop.comm FILE comm_test.py LABEL interop TIMEOUT 400)
