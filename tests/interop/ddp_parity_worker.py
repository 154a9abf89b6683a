"""A rank of Python's DistributedDataParallel: what lockstep_parity does in mode "train"."""

import collections
import contextlib
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import parity_models


def register_hook(ddp, config):
    if config.get("hook", "none") != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        hooks = {"allreduce": default_hooks.allreduce_hook, "fp16_compress": default_hooks.fp16_compress_hook}
        ddp.register_comm_hook(None, hooks[config["hook"]])
    if "power_sgd" in config:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
        options = config["power_sgd"]
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(
            None, options["rank"], options["start"], options.get("rate", 2), options.get("feedback", True),
            options.get("warm", True), options.get("epsilon", 0), options.get("seed", 0),
            batch_tensors_with_same_shape=options.get("batch", False)), power_sgd_in_turn)
    if "post_local_sgd" in config:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
        options = config["post_local_sgd"]
        subgroup, _ = dist.new_subgroups(group_size=options["subgroup"])
        ddp.register_comm_hook(post_localSGD_hook.PostLocalSGDState(None, subgroup, options["start"]),
                               post_localSGD_hook.post_localSGD_hook)


def power_sgd_in_turn(state, bucket):
    """Python's hook, a bucket at a time. Its callbacks start further collectives from Gloo's threads: with several
    buckets each rank would call them in an order of its own, and Gloo aborts."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


def make_averager(config):
    from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
    if "period" in config:
        return averagers.PeriodicModelAverager(config["period"], config["warmup"])
    if "hierarchy" in config:
        return hierarchical_model_averager.HierarchicalModelAverager(
            collections.OrderedDict(config["hierarchy"]), config["warmup"])
    return None


def train(config):
    rank = dist.get_rank()
    data = load_file(config["input"])
    model = parity_models.make(config["model"], config["seed"] + rank)
    caps = {"bucket_cap_mb": config["bucket_cap_mb"]} if "bucket_cap_mb" in config else {}
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=config["python_view"], static_graph=config.get("static_graph", False),
        find_unused_parameters=config.get("find_unused_parameters", False), **caps)
    register_hook(ddp, config)
    averager = make_averager(config)
    optimizer = torch.optim.SGD(ddp.parameters(), **config["options"])
    accumulate = config.get("accumulate", 1)
    loss_of = torch.nn.functional.mse_loss if config["model"] == "linear" else torch.nn.functional.cross_entropy
    losses = []
    for step in range(data["x"].shape[0]):
        if step % accumulate == 0:
            optimizer.zero_grad()
        last = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = loss_of(ddp(data["x"][step][rank]), data["y"][step][rank])
            losses.append(loss.item())
            loss.backward()
        if last:
            optimizer.step()
            if averager:
                averager.average_parameters(ddp.parameters())
    save_file({"losses": torch.tensor(losses), **{k: v.contiguous() for k, v in model.state_dict().items()}},
              f"{config['output']}.{rank}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", init_method=f"file://{job['meet']}", rank=int(sys.argv[2]),
                            world_size=int(sys.argv[3]))
    for run in job["runs"]:
        train(run)
    # A Gloo group that Python destroys can wait for ever for one of its threads, and torch aborts at times as it ends.
    os._exit(0)
