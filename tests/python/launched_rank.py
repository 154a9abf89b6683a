"""A rank of `lockstep run`: one all-reduce over "lockstep"."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("lockstep")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
# The executable as it was called: a virtual environment's python is a link.
print(f"rank {dist.get_rank()}: {total.item()}, {sys.argv[1:]}, {sys.executable.replace('python3', 'python')}", flush=True)
dist.destroy_process_group()
assert os.environ["LOCAL_RANK"] == os.environ["RANK"]
