# The pipeline strategy against Python's torch.distributed.pipelining.
lockstep_rank_program(lockstep_pipeline_rank pipeline_rank.cpp pipeline data models)
lockstep_script_test(interop.pipeline FILE test_pipeline.py LABEL interop TIMEOUT 400)
