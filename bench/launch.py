"""The twin of `lockstep bench launch`'s worker, started by torchrun: one all-reduce, and out."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == dist.get_world_size()
dist.destroy_process_group()
