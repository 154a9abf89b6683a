"""A rank of Python's torch.amp: what lockstep_amp_parity does in C++."""

import contextlib
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import parity_models

HALF = {"bf16": torch.bfloat16, "16": torch.float16}


def number(value):
    return torch.tensor([value], dtype=torch.float64)


def run_scaler(config):
    data = load_file(config["input"])
    parameter = torch.nn.Parameter(data["p"].clone())
    make = {"sgd": lambda p, lr: torch.optim.SGD(p, lr), "adam": lambda p, lr: torch.optim.Adam(p, lr, fused=True)}
    optimizer = make[config["optimizer"]]([parameter], config["lr"])
    kind = ShardedGradScaler if config.get("sharded") else torch.amp.GradScaler
    scaler = kind("cpu", **config["scaler"])
    out = {}
    for step in range(config["steps"]):
        optimizer.zero_grad()
        scaler.scale((parameter * data[f"g.{dist.get_rank()}.{step}"]).sum()).backward()
        if "max_norm" in config:
            scaler.unscale_(optimizer)
            out[f"norm.{step}"] = number(torch.nn.utils.clip_grad_norm_([parameter], config["max_norm"]).item())
        scaler.step(optimizer)
        scaler.update(config["new_scale"] if "new_scale" in config and step == config["steps"] // 3 else None)
        if config.get("reload") and step == config["steps"] // 2:
            fresh = kind("cpu")
            fresh.load_state_dict(scaler.state_dict())
            scaler = fresh
        out[f"p.{step}"] = parameter.detach().clone()
        for name, value in scaler.state_dict().items():
            dtype = torch.int64 if isinstance(value, int) else torch.float64
            out[f"{name}.{step}"] = torch.tensor([value], dtype=dtype)
    return out


class Masters:
    """Apex's O2, by hand: float32 copies of the float16 parameters."""

    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        self.sgd = torch.optim.SGD(self.masters, lr, momentum=0.9)

    def unscale(self, scale):
        """Whether all gradients are finite."""
        found = torch.zeros(())
        for p, master in zip(self.parameters, self.masters):
            master.grad = p.grad.float()
        torch._amp_foreach_non_finite_check_and_unscale_([m.grad for m in self.masters], found,
                                                         torch.tensor(1 / scale, dtype=torch.float32))
        return found.item() == 0

    def step(self):
        self.sgd.step()
        with torch.no_grad():
            for p, master in zip(self.parameters, self.masters):
                p.copy_(master)


def train(config):
    data, rank = load_file(config["input"]), dist.get_rank()
    model = parity_models.make(config["model"], config["seed"])
    level, precision = config.get("level", ""), config["precision"]
    half = HALF.get(precision.split("-")[0], torch.float16)
    mixed = precision.endswith("-mixed") and level != "O2"
    if not mixed:
        for module in model.modules():
            if level != "O2" or not isinstance(module, torch.nn.BatchNorm2d):
                module.to(half) if not list(module.children()) else None
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if level == "O2":
        optimizer = Masters(model.parameters(), config["lr"])
    else:
        optimizer = torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=half is torch.float16 and precision != "16-true")
    accumulate = config.get("accumulate", 1)
    scale, out = 65536.0, {}  # of O2
    for step in range(data["x"].shape[0]):
        last = (step + 1) % accumulate == 0
        x, y = data["x"][step][rank], data["y"][step][rank]
        with contextlib.nullcontext() if last else ddp.no_sync():
            with torch.autocast("cpu", half, enabled=mixed):
                loss = torch.nn.functional.cross_entropy(ddp(x if mixed else x.to(half)).float(), y)
                out[f"loss.{step}"] = loss.detach().reshape(1)
                loss = loss / accumulate
            (loss * scale if level == "O2" else scaler.scale(loss)).backward()
        if not last:
            continue
        if level == "O2":
            if optimizer.unscale(scale):
                optimizer.step()
            else:
                scale /= 2
        else:
            scaler.unscale_(optimizer)
            if "max_norm" in config:
                out[f"norm.{step}"] = number(
                    torch.nn.utils.clip_grad_norm_(model.parameters(), config["max_norm"]).item())
            scaler.step(optimizer)
            scaler.update()
        model.zero_grad()
        out[f"scale.{step}"] = number(scale if level == "O2" else scaler.get_scale())
    return {**out, **{name: tensor.contiguous() for name, tensor in model.state_dict().items()}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", init_method=f"file://{job['meet']}", rank=int(sys.argv[2]),
                            world_size=int(sys.argv[3]))
    for run in job["runs"]:
        results = run_scaler(run) if run["mode"] == "scaler" else train(run)
        save_file(results, f"{run['output']}.{dist.get_rank()}")
    # A Gloo group that Python destroys can wait for ever for one of its threads, and torch aborts at times as it ends.
    os._exit(0)
