# Sampler, transforms and loader against Python's torch.
lockstep_rank_program(data_probe data_probe.cpp data)
lockstep_script_test(interop.data FILE data_test.py LABEL interop)
