"""A rank of Python's DDP that says in which memory the buckets of gradients lie, step by step.

RANK SIZE MEET BACKEND
"""

import os
import sys

import torch
import torch.distributed as dist

rank, size, meet, backend = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=size)


def memory_of(tensor):
    """What the kernel calls the mapping in which the tensor lies; empty for the heap's anonymous ones."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, _, *name = line.split(maxsplit=5)
            begin, end = (int(bound, 16) for bound in span.split("-"))
            if begin <= tensor.data_ptr() < end:
                return name[0].strip() if name else ""


def hook(_, bucket):
    seen.append(memory_of(bucket.buffer()))
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / size)
    return future


ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10, bias=False))
ddp.register_comm_hook(None, hook)
for _ in range(3):  # DDP makes its buckets anew after the first step
    seen = []
    ddp(torch.ones(2, 100)).sum().backward()
    print(*seen, sep="|", flush=True)
dist.destroy_process_group()
os._exit(0)  # As in ddp_rank.py
