"""A rank of Python's DDP: trains the MLP over a backend and writes losses and weights.

RANK SIZE MEET BACKEND OUTPUT
"""

import os
import sys

import torch
import torch.distributed as dist

rank, size, meet, backend, output = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
torch.set_num_threads(1)
dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=size)

torch.manual_seed(3)
data = torch.randn(8, size, 32, 784)
labels = torch.randint(10, (8, size, 32))
torch.manual_seed(5 + rank)  # DDP gives all ranks the first one's weights
model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
losses = []
for step in range(8):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(ddp(data[step, rank]), labels[step, rank])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
torch.save({"losses": torch.tensor(losses), **model.state_dict()}, f"{output}.{rank}")
if backend == "lockstep":
    import lockstep

    print(*lockstep.backend_info(), sep="|", flush=True)
dist.destroy_process_group()
os._exit(0)  # Python's torch aborts once in some hundred runs while the interpreter goes down
