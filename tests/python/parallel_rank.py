"""A rank of test_parallel.py: RANK SIZE MEET BACKEND OUTPUT trains in several ways and writes the weights."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

rank, size, meet, backend, output = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
torch.set_num_threads(1)
dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=size)


def make_model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.ReLU(), torch.nn.Linear(20, 4))


def train(model, optimizer, steps=4):
    torch.manual_seed(7)
    for data in torch.randn(steps, size, 8, 30):
        optimizer.zero_grad()
        model(data[rank]).square().sum().backward()
        optimizer.step()


def zero():
    """ZeroRedundancyOptimizer under DDP: each rank steps a part."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    train(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01))
    return model.state_dict()


def fsdp2():
    """fully_shard, the gradients reduced by reduce_scatter."""
    mesh = init_device_mesh("cpu", (size,))
    model = make_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def hybrid():
    """fully_shard over a mesh of two dimensions: shards in one, copies in the other."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
    model = make_model()
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def collectives():
    """Functional collectives over a mesh, also while they are traced by autograd."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    given = torch.arange(4.0) + 10 * rank
    outer = mesh["outer"].get_group()
    return {
        "all_reduce": functional.all_reduce(given, "sum", outer).clone(),
        "all_gather": functional.all_gather_tensor(given, 0, mesh["inner"].get_group()).clone(),
        "reduce_scatter": functional.reduce_scatter_tensor(given, "avg", 0, outer).clone(),
        "all_to_all": functional.all_to_all_single(given, None, None, outer).clone(),
    }


def join():
    """Ranks with unequal numbers of batches."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with ddp.join():
        train(ddp, optimizer, steps=2 + rank)
    return model.state_dict()


results = {f"{way.__name__}.{name}": value.detach().clone() for way in (zero, fsdp2, hybrid, collectives, join)
           for name, value in way().items()}
torch.save(results, f"{output}.{rank}")
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # Python's torch aborts once in some hundred runs while the interpreter goes down
