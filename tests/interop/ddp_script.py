"""The Python script whose weights `lockstep train` must reach: DDP over Gloo (or NCCL) on MNIST or digits, SGD or LBFGS.

Started once a rank by test_train_parity.py: ddp_script.py RANK WORLD_SIZE FILE-FOR-MEETING OUT MNIST-FOLDER OPTIONS-AS-JSON
"""

import faulthandler
import functools
import gzip
import itertools
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.layers(x.reshape(len(x), 784))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()

        def block(inputs, outputs):
            return nn.Sequential(nn.Conv2d(inputs, outputs, kernel_size=5, stride=1, padding=2),
                                 nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(kernel_size=2, stride=2))

        self.layer1 = block(1, 16)
        self.layer2 = block(16, 32)
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(x)).reshape(len(x), -1))


def read_idx(folder, name):
    plain, packed = folder / name, folder / (name + ".gz")
    content = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    shape = [int.from_bytes(content[4 + 4 * i:8 + 4 * i], "big") for i in range(content[3])]
    return torch.frombuffer(bytearray(content[4 + 4 * len(shape):]), dtype=torch.uint8).reshape(shape)


def mnist(folder):
    """All training images as torchvision's ToTensor and Normalize give them."""
    images = read_idx(folder, "train-images-idx3-ubyte").unsqueeze(1).to(torch.float32).div_(255)
    images.sub_(torch.tensor([0.1307]).view(1, 1, 1, 1)).div_(torch.tensor([0.3081]).view(1, 1, 1, 1))
    return TensorDataset(images, read_idx(folder, "train-labels-idx1-ubyte").long())


def windows(path, context):
    """nanoGPT's characters, the first nine tenths of a text, as windows one after the other."""
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text[:int(len(text) * 0.9)]])
    starts = range(0, len(tokens) - context, context)
    return TensorDataset(torch.stack([tokens[i:i + context] for i in starts]),
                         torch.stack([tokens[i + 1:i + 1 + context] for i in starts]))


def make_model(name):
    if name.endswith(".pt"):
        return torch.jit.load(name)
    if name.startswith("gpt"):
        import parity_models

        return parity_models.MODELS[name]()
    return {"mlp": Mlp, "convnet": ConvNet}[name]()


def search_in_doubles(lr):
    """The scalars of LBFGS's line search as doubles, which LibTorch's are. Python's are float32 tensors: the first
    cubic interpolations of a nearly linear loss make 5e-4 of a step from their last bit."""
    from torch.optim import lbfgs

    interpolate, search = lbfgs._cubic_interpolate, lbfgs._strong_wolfe

    def double(value):
        return torch.tensor(float(value), dtype=torch.float64)

    def interpolate_in_doubles(*points, bounds=None):
        return float(interpolate(*map(double, points), bounds=bounds and tuple(map(double, bounds))))

    def search_from_double(objective, x, t, d, f, g, gtd, **rest):
        if torch.is_tensor(t):  # The first step
            t = min(1.0, 1.0 / float(g.abs().sum())) * lr
        return search(objective, x, t, d, f, g, gtd, **rest)

    lbfgs._cubic_interpolate, lbfgs._strong_wolfe = interpolate_in_doubles, search_from_double


def save_start(folder, ddp, optimizer, rank):
    """As torch.save and as torch.distributed.checkpoint, where the optimizer's state has the parameters' names."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if rank == 0:
        torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}, folder / "start.pt")
    model, state = get_state_dict(ddp, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder / "start")


def main():
    rank, world_size, meeting, out, folder, options = sys.argv[1:]
    rank, world_size, options = int(rank), int(world_size), json.loads(options)
    faulthandler.dump_traceback_later(150, exit=True)
    torch.set_num_threads(1)
    backend = options.get("backend", "gloo")
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    if options.get("deterministic"):  # The call imports the compiler, which takes seconds.
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    data = windows(folder, options["context"]) if "context" in options else mnist(pathlib.Path(folder))
    sampler = DistributedSampler(data, world_size, rank, seed=options["seed"])
    loader = DataLoader(data, batch_size=options["batch_size"], sampler=sampler)
    torch.manual_seed(options["seed"])
    model = make_model(options["model"]).to(device)
    ddp = nn.parallel.DistributedDataParallel(model)
    if options.get("optimizer") == "lbfgs":
        search_in_doubles(options["lr"])
        optimizer = torch.optim.LBFGS(ddp.parameters(), lr=options["lr"], max_iter=options["max_iter"],
                                      history_size=options["history_size"], line_search_fn=options["line_search_fn"])
    elif options.get("optimizer"):
        optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options["optimizer"]](
            ddp.parameters(), lr=options["lr"], weight_decay=options.get("weight_decay", 0), fused=True)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=options["lr"], momentum=options["momentum"],
                                    weight_decay=options.get("weight_decay", 0),
                                    nesterov=options.get("nesterov", False))

    def evaluate(images, labels):
        optimizer.zero_grad()
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(ddp(images).flatten(0, -2), labels.flatten())
        loss.backward()
        if options.get("clip"):
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), options["clip"])
        return loss

    def mean_loss(images, labels):
        """Of all ranks, so that all of them search alike."""
        mean = evaluate(images, labels).detach().double() / world_size
        dist.all_reduce(mean)
        return mean

    if "before" in options:  # So many steps of another epoch, and what Lockstep goes on from.
        sampler.set_epoch(1000)
        for images, labels in itertools.islice(loader, options["before"]):
            evaluate(images, labels)
            optimizer.step()
        save_start(pathlib.Path(out).parent, ddp, optimizer, rank)
    for epoch in range(options["epochs"]):
        sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            if i == options["batches"]:
                break
            if options.get("optimizer") == "lbfgs":
                optimizer.step(functools.partial(mean_loss, images, labels))
            else:
                evaluate(images, labels)
                optimizer.step()
    if rank == 0:
        save_file({name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}, out)
    # A Gloo group that Python destroys can wait for ever for one of its threads, and torch aborts at times as it ends.
    os._exit(0)


main()
