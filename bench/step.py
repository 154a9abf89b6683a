"""The twin of `lockstep bench step`: a training step of a model by each of torch.distributed's strategies, on a
batch that stays."""

import contextlib

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}
MICRO_BATCHES = 4  # As StrategyOptions has it.


def autocast(precision):
    if precision == "32-true":
        return contextlib.nullcontext()
    if precision == "bf16-mixed":
        return torch.autocast("cpu", torch.bfloat16)
    raise ValueError(f"no twin of --precision {precision}")


def whole_model_step(model, optimizer, loss_of, x, y, precision):
    def step():
        optimizer.zero_grad()
        with autocast(precision):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def ddp(module, optimizer, loss_of, x, y, precision):
    model = nn.parallel.DistributedDataParallel(module)
    make, options = OPTIMIZERS[optimizer]
    return whole_model_step(model, make(model.parameters(), **options), loss_of, x, y, precision)


def zero1(module, optimizer, loss_of, x, y, precision):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = nn.parallel.DistributedDataParallel(module)
    make, options = OPTIMIZERS[optimizer]
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, **options)
    return whole_model_step(model, sharded, loss_of, x, y, precision)


def fsdp(module, optimizer, loss_of, x, y, precision):
    from torch.distributed.fsdp import fully_shard
    for layer in common.blocks(module):
        fully_shard(layer)
    fully_shard(module)
    make, options = OPTIMIZERS[optimizer]
    return whole_model_step(module, make(module.parameters(), **options), loss_of, x, y, precision)


def pipeline(module, optimizer, loss_of, x, y, precision):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = common.chain(module)
    cuts = common.balanced_cuts(layers, size)
    stage_module = nn.Sequential(*layers[cuts[rank]:cuts[rank + 1]])
    stage = PipelineStage(stage_module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    make, options = OPTIMIZERS[optimizer]
    own = make(stage_module.parameters(), **options)
    first, last = rank == 0, rank == size - 1

    def step():
        own.zero_grad()
        with autocast(precision):
            schedule.step(*((x,) if first else ()), **({"target": y} if last else {}))
        own.step()

    return step


STRATEGIES = {"ddp": ddp, "zero1": zero1, "fsdp": fsdp, "pipeline": pipeline}


def main():
    config = common.config()
    common.join(config)
    make, shape, outputs, regression = common.MODELS[config["model"]]
    torch.manual_seed(0)
    module = make()
    batch = config["batch_size"]
    x = torch.rand(batch, *shape)
    y = torch.rand(batch, outputs) if regression else torch.randint(outputs, (batch,))
    loss_of = F.mse_loss if regression else F.cross_entropy
    step = STRATEGIES[config["strategy"]](module, config["optimizer"], loss_of, x, y, config["precision"])
    us = common.median_us(step, config["warmup"], config["steps"])
    common.finish(config, {"us_per_step": us})


main()
