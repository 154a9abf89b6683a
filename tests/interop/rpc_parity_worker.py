"""Does in Python's RPC what rpc_parity.cpp does in ours: rpc_parity_worker.py RANK STORE OUTPUT"""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer


class Layer:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.weight = torch.randn(20, 20).mul_(0.2).requires_grad_()

    def forward(self, x):
        return x.matmul(self.weight).tanh()

    def parameter(self):
        return rpc.RRef(self.weight)


def gradient(layer, context):
    return dist_autograd.get_gradients(context)[layer.local_value().weight]


def forward_through(first, second, x):
    return second.rpc_sync().forward(first.local_value().forward(x))


def train(output):
    from safetensors.torch import save_file

    results = {}
    one, two = rpc.remote("worker1", Layer, (3,)), rpc.remote("worker2", Layer, (4,))
    parameters = [one.rpc_sync().parameter(), two.rpc_sync().parameter()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05, momentum=0.9)
    for step in range(5):
        torch.manual_seed(100 + step)
        x = torch.randn(8, 20)
        with dist_autograd.context() as context:
            y = rpc.rpc_sync("worker1", forward_through, (one, two, x)) + one.rpc_sync().forward(x)
            loss = y.square().mean()
            dist_autograd.backward(context, [loss])
            results[f"loss.{step}"] = loss.detach().view(1)
            results[f"one.{step}"] = rpc.rpc_sync("worker1", gradient, (one, context))
            results[f"two.{step}"] = rpc.rpc_sync("worker2", gradient, (two, context))
            optimizer.step(context)
    results["one"], results["two"] = (reference.to_here().detach() for reference in parameters)
    save_file(results, output)


if __name__ == "__main__":
    rank, store, output = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", num_worker_threads=8)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        train(output)
    rpc.shutdown()
    # Python's torch aborts once in some hundred runs while the interpreter goes down.
    os._exit(0)
