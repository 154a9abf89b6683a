"""The twin of `lockstep bench step`: DDP, torch.optim.SGD with momentum, a batch that stays."""

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def main():
    config = common.config()
    common.join(config)
    make, shape, outputs, regression = common.MODELS[config["model"]]
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = config["batch_size"]
    x = torch.rand(batch, *shape)
    y = torch.rand(batch, outputs) if regression else torch.randint(outputs, (batch,))
    loss_of = F.mse_loss if regression else F.cross_entropy

    def step():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()

    us = common.median_us(step, config["warmup"], config["steps"])
    common.finish(config, {"us_per_step": us})


main()
