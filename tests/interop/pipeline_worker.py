"""A rank of Python's torch.distributed.pipelining: what lockstep_pipeline_rank does."""

import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
}


def built_in(name):
    """The layers of a model of `lockstep bench`, which are those of its own chain."""
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "bench"))
    import common

    torch.manual_seed(0)
    if name.startswith("gpt"):
        return list(common.make_gpt())
    return list(common.MODELS[name][0]().layers)


def make_stages(config, given, rank, ranks):
    if "model" in config:
        layers, starts = built_in(config["model"]), config["starts"]
        modules = [(start, nn.Sequential(*layers[start:(starts + [len(layers)])[stage + 1]]))
                   for stage, start in enumerate(starts) if stage % ranks == rank]
        return [PipelineStage(module, starts.index(start), len(starts), torch.device("cpu"))
                for start, module in modules], modules
    widths, starts = config["widths"], config["starts"]
    layers = len(widths) - 1
    stages, modules = [], []
    for stage in range(rank, len(starts), ranks):
        end = starts[stage + 1] if stage + 1 < len(starts) else layers
        module = nn.Sequential()
        for i in range(starts[stage], end):
            linear = nn.Linear(widths[i], widths[i + 1])
            linear.load_state_dict({"weight": given[f"{i}.weight"], "bias": given[f"{i}.bias"]})
            module.append(linear)
            if i + 1 < layers:
                module.append(nn.ReLU())
        modules.append((starts[stage], module))
        stages.append(PipelineStage(module, stage, len(starts), torch.device("cpu")))
    return stages, modules


def run(config, rank, ranks):
    given = load_file(config["input"])
    stages, modules = make_stages(config, given, rank, ranks)
    kind = SCHEDULES[config["schedule"]]
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    schedule = kind(stages if several else stages[0], config["micro_batches"],
                    loss_fn=lambda output, target: torch.nn.functional.cross_entropy(
                        output.reshape(-1, output.shape[-1]), target.reshape(-1)))
    parameters = [p for _, module in modules for p in module.parameters()]
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[config["optimizer"]](parameters, lr=config["lr"])
    losses = []

    def step(x, y):
        optimizer.zero_grad()
        found = []
        schedule.step(*([x] if rank == 0 else []), target=y if rank == ranks - 1 else None, losses=found)
        losses.extend(loss.item() for loss in found)
        optimizer.step()

    if "steps" in config:
        times = []
        for i in range(config["steps"] + 20):
            start = time.perf_counter()
            step(given["x"][0], given["y"][0])
            times.append(time.perf_counter() - start)
        if rank == 0:
            times = sorted(times[20:])
            print(f"{times[int(len(times) * config.get('quantile', 0.5))] * 1e6:.1f}", flush=True)
        return
    for x, y in zip(given["x"], given["y"]):
        step(x, y)
    state = {}
    for start, module in modules:
        for i, linear in enumerate(m for m in module if isinstance(m, nn.Linear)):
            state[f"{start + i}.weight"] = linear.weight.detach()
            state[f"{start + i}.bias"] = linear.bias.detach()
    save_file(state, f"{config['output']}.{rank}")
    if rank == ranks - 1:
        save_file({"losses": torch.tensor(losses)}, f"{config['output']}.losses")


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    own_rank, size = int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{job['meet']}", rank=own_rank, world_size=size)
    for one in job["runs"]:
        run(one, own_rank, size)
    dist.barrier()
    os._exit(0)
