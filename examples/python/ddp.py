"""Python's DistributedDataParallel over Lockstep: an MLP on made-up data.

    pip install .                                      # in Lockstep's folder
    lockstep run --nproc-per-node 2 examples/python/ddp.py
    torchrun --nproc-per-node 2 examples/python/ddp.py --backend gloo
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="lockstep", help="lockstep, gloo or another one")
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args()


def main():
    options = parse()
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    points = torch.randn(4096, 20)
    labels = (points[:, :2].prod(1) > 0).long()  # XOR of two signs
    data = torch.utils.data.TensorDataset(points, labels)
    sampler = torch.utils.data.DistributedSampler(data, size, rank)
    loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)

    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        right = (model(points).argmax(1) == labels).float().mean()
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {right:.3f}, {time.perf_counter() - begin:.2f} s", flush=True)
    if rank == 0 and options.backend == "lockstep":
        import lockstep

        info = lockstep.backend_info()
        print(f"over {info.name}: {info.reason}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
