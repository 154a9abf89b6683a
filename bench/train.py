"""The twin of `lockstep train` on MNIST as `lockstep bench train` runs it: as in the seeds, a program
that spawns its ranks, with DDP over gloo, a DataLoader and torch.optim.SGD with momentum."""

import os

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def evaluate(model, config, rank):
    """Accuracy over the test part: every rank looks at its share, no sample counts twice."""
    dataset = common.Mnist(config["folder"], "test")
    share = torch.utils.data.Subset(dataset, range(rank, len(dataset), config["ranks"]))
    correct = torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        for x, y in DataLoader(share, 1000):
            correct += (model(x.flatten(1)).argmax(1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(dataset)


def train(rank, config):
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=config["init_method"], rank=rank, world_size=config["ranks"])
    torch.manual_seed(0)
    module = common.MODELS["mlp"][0]()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = common.Mnist(config["folder"], "train")
    sampler = DistributedSampler(dataset, config["ranks"], rank, seed=0)
    loader = DataLoader(dataset, config["batch_size"], sampler=sampler)
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.flatten(1)), y).backward()
            optimizer.step()
    accuracy = evaluate(module, config, rank)
    common.finish(config, {"accuracy": accuracy})


if __name__ == "__main__":
    settings = common.config()
    mp.spawn(train, (settings,), settings["ranks"])
