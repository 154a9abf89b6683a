# FullyShardedDataParallel against Python's FSDP2 (fully_shard).
lockstep_rank_program(lockstep_fsdp_rank fsdp_rank.cpp fsdp parallel optim models data)
lockstep_script_test(interop.fsdp_parity FILE test_fsdp_parity.py LABEL interop TIMEOUT 300)
