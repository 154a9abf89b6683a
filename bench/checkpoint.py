"""The twin of `lockstep bench checkpoint`: torch.save of the whole state by rank 0, and async_save of
torch.distributed.checkpoint, each until the bytes are on the disk."""

import os
import pathlib
import shutil
import statistics
import time

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard


def train_a_step(config):
    task = common.Task(config["model"])
    model = task.make()
    if config["strategy"] == "fsdp":
        for layer in common.blocks(model):
            fully_shard(layer)
        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = common.make_optimizer(config["optimizer"], model.parameters())
    x, y = task.batch(config["batch_size"])
    task.loss(model(x), y).backward()
    optimizer.step()
    return model, optimizer


def save_whole(model, optimizer, file):
    state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(state, file)
        with open(file) as written:
            os.fsync(written.fileno())


def slowest(run):
    """The seconds that the slowest rank takes, all beginning at once; and what `run` gave."""
    dist.barrier()
    start = time.perf_counter()
    result = run()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), result


def main():
    config = common.config()
    common.join(config)
    model, optimizer = train_a_step(config)
    folder = pathlib.Path(config["folder"])
    of_saves = dist.new_group(backend="gloo")  # Its thread must not talk between our own calls.
    whole, stalls, sharded = [], [], []
    for i in range(config["saves"] + 1):
        file, target = folder / "whole.pt", folder / f"dcp{i}"
        whole.append(slowest(lambda: save_whole(model, optimizer, file))[0])
        stall, pending = slowest(
            lambda: dcp.async_save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))),
                                   checkpoint_id=target, process_group=of_saves))
        stalls.append(stall * 1e3)
        sharded.append(stall + slowest(pending.result)[0])
        dist.barrier()
        if dist.get_rank() == 0:
            file.unlink()
            shutil.rmtree(target)
    names = ("torch_save_s", "dcp_stall_ms", "dcp_s")
    common.finish(config, {name: statistics.median(times[1:]) for name, times in zip(names, (whole, stalls, sharded))})


main()
