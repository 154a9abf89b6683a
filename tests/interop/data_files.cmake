# Data files that Python writes and Lockstep reads, and the other way round.
lockstep_rank_program(data_files_tool data_files_tool.cpp data)
lockstep_script_test(interop.data_files FILE data_files_test.py LABEL interop)
lockstep_script_test(interop.data_sets FILE data_sets_test.py LABEL interop)
lockstep_script_test(interop.checkpoints FILE test_checkpoints.py LABEL interop TIMEOUT 3600 COST 30)
