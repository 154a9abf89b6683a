"""A rank of Python's DistributedDataParallel with ZeroRedundancyOptimizer: what lockstep_zero_parity does."""

import contextlib
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

import parity_models

OPTIMIZERS = {
    # The fused kernel: its bits are ours.
    "adam": (torch.optim.Adam, {"fused": True}),
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {}),
}


def state_of(optimizer, zero):
    """By "NAME.parameter-index", as ours."""
    if not zero:
        return {}
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() != 0:
        return {}
    return {f"s.{name}.{index}": tensor.clone() for index, fields in optimizer.state_dict()["state"].items()
            for name, tensor in fields.items() if torch.is_tensor(tensor)}


def train(config):
    rank = dist.get_rank()
    data = load_file(config["input"])
    model = parity_models.make(config["model"], config["seed"] + rank)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    kind, extra = OPTIMIZERS[config["optimizer"]]
    options = {key: config[key] for key in ("lr", "momentum", "weight_decay") if key in config} | extra
    # Python's joined ranks step their part from the gradients of their own last batch, which is not the mean. So what a
    # Join must give is that of the optimizer without shards.
    zero = config["way"] != "join"
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **options)
    else:
        optimizer = kind(model.parameters(), **options)
    losses = []

    def loop(steps):
        accumulate = config.get("accumulate", 1)
        for step in range(steps):
            if step % accumulate == 0:
                optimizer.zero_grad()
            last = (step + 1) % accumulate == 0
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = torch.nn.functional.cross_entropy(ddp(data["x"][step][rank]), data["y"][step][rank])
                losses.append(loss.item())
                loss.backward()
            if last:
                if "max_norm" in config:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), config["max_norm"])
                optimizer.step()

    if config["way"] == "join":
        with Join([ddp], divide_by_initial_world_size=config["divide_by_all"]):
            loop(config["inputs"][rank])
    else:
        loop(data["x"].shape[0])
    tensors = {"losses": torch.tensor(losses), **model.state_dict(), **state_of(optimizer, zero)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{config['output']}.{rank}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", init_method=f"file://{job['meet']}", rank=int(sys.argv[2]),
                            world_size=int(sys.argv[3]))
    for run in job["runs"]:
        train(run)
    # A Gloo group that Python destroys can wait for ever for one of its threads, and torch aborts at times as it ends.
    os._exit(0)
