"""A rank of Python's FSDP2: what lockstep_fsdp_rank does in C++. fsdp_worker.py CONFIG.json RANK SIZE"""

import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import parity_models


def make(config):
    model = parity_models.make(config["model"], config["seed"])
    if config.get("strategy", "fsdp") == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        policy = {}
        if config.get("bfloat16"):
            policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        blocks = model.h if hasattr(model, "h") else model.layers if hasattr(model, "layers") else model.children()
        for layer in blocks:
            if list(layer.parameters()):
                fully_shard(layer, reshard_after_forward=config.get("reshard", True), **policy)
        fully_shard(model, **policy)
    return model, torch.optim.Adam(model.parameters(), lr=config["lr"], fused=True)


def loss_of(output, target):
    logits = output.float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def train(config):
    rank = dist.get_rank()
    data = load_file(config["input"])
    model, optimizer = make(config)
    losses = []
    for x, y in zip(data["x"], data["y"]):
        loss = loss_of(model(x[rank]), y[rank])
        losses.append(loss.item())
        loss.backward()
        if "max_norm" in config:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
    state = {name: (value.full_tensor() if isinstance(value, DTensor) else value).contiguous()
             for name, value in model.state_dict().items()}
    save_file({"losses": torch.tensor(losses), **(state if rank == 0 else {})}, f"{config['output']}.{rank}")


def time_steps(config):
    data = load_file(config["input"])
    model, optimizer = make(config)
    x, y = data["x"][0][0], data["y"][0][0]
    times = []
    for step in range(config["warmup"] + config["steps"]):
        start = time.perf_counter()
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        median = statistics.median(times[config["warmup"]:]) * 1e6
        print(config["model"], config.get("strategy", "fsdp"), f"{median:.1f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", init_method=f"file://{job['meet']}", rank=int(sys.argv[2]),
                            world_size=int(sys.argv[3]))
    for run in job["runs"]:
        (time_steps if job["mode"] == "time" else train)(run)
    dist.barrier()
    sys.stdout.flush()
    # A Gloo group that Python destroys can wait for ever for one of its threads, and torch aborts at times as it ends.
    os._exit(0)
