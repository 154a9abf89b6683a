"""The twin of `lockstep bench step`: a training step of a model by each of torch.distributed's strategies, on a
batch that stays."""

import contextlib

import common
import torch
import torch.distributed as dist
from torch import nn

MICRO_BATCHES = 4  # As StrategyOptions has it.


def autocast(precision, device):
    if precision == "32-true":
        return contextlib.nullcontext()
    if precision == "bf16-mixed":
        return torch.autocast(device.type, torch.bfloat16)
    raise ValueError(f"no twin of --precision {precision}")


def whole_model_step(model, optimizer, loss_of, x, y, precision):
    def step():
        optimizer.zero_grad()
        with autocast(precision, x.device):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def ddp(module, optimizer, loss_of, x, y, precision):
    model = nn.parallel.DistributedDataParallel(module)
    return whole_model_step(model, common.make_optimizer(optimizer, model.parameters()), loss_of, x, y, precision)


def zero1(module, optimizer, loss_of, x, y, precision):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = nn.parallel.DistributedDataParallel(module)
    like = common.make_optimizer(optimizer, [torch.zeros(1)])
    options = {"lr": like.defaults["lr"]} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=type(like), **options)
    return whole_model_step(model, sharded, loss_of, x, y, precision)


def fsdp(module, optimizer, loss_of, x, y, precision):
    from torch.distributed.fsdp import fully_shard
    for layer in common.blocks(module):
        fully_shard(layer)
    fully_shard(module)
    return whole_model_step(module, common.make_optimizer(optimizer, module.parameters()), loss_of, x, y, precision)


def pipeline(module, optimizer, loss_of, x, y, precision):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = common.chain(module)
    cuts = common.balanced_cuts(layers, size)
    stage_module = nn.Sequential(*layers[cuts[rank]:cuts[rank + 1]])
    stage = PipelineStage(stage_module, rank, size, x.device)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    own = common.make_optimizer(optimizer, stage_module.parameters())
    first, last = rank == 0, rank == size - 1

    def step():
        own.zero_grad()
        with autocast(precision, x.device):
            schedule.step(*((x,) if first else ()), **({"target": y} if last else {}))
        own.step()

    return step


STRATEGIES = {"ddp": ddp, "zero1": zero1, "fsdp": fsdp, "pipeline": pipeline}


def main():
    config = common.config()
    common.join(config)
    task = common.Task(config["model"])
    torch.manual_seed(0)
    module = task.make().to(common.device(config))
    x, y = (tensor.to(common.device(config)) for tensor in task.batch(config["batch_size"]))
    step = STRATEGIES[config["strategy"]](module, config["optimizer"], task.loss, x, y, config["precision"])
    us = common.median_us(step, config["warmup"], config["steps"])
    common.finish(config, {"us_per_step": us})


main()
