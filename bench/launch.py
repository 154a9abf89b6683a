"""The twin of `lockstep bench launch`'s worker, started by torchrun or `lockstep run`: one all-reduce, and out."""

import json
import pathlib
import sys

import torch
import torch.distributed as dist

config = json.loads(sys.argv[1])
dist.init_process_group(config.get("backend", "gloo"))
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == dist.get_world_size()
# Whatever happens from here on happens while it ends.
pathlib.Path(config["result"]).write_text("{}")
dist.destroy_process_group()
