"""What the Python twins of `lockstep bench` share.

Each script is given one JSON object, the same that the C++ worker gets, and writes its result as
JSON to the file that it names.
"""

import gzip
import json
import math
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def config():
    return json.loads(sys.argv[1])


def join(config):
    """Joins the group of the other ranks; the launcher's variables give rank and size."""
    dist.init_process_group(config["backend"], init_method=config["init_method"],
                            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def write_result(config, result):
    if int(os.environ.get("RANK", 0)) == 0:
        pathlib.Path(config["result"]).write_text(json.dumps(result))


def finish(config, result):
    """Writes the result and leaves the group. All ranks wait until it is written: what happens while they end can no
    longer keep it from being."""
    write_result(config, result)
    dist.barrier()
    dist.destroy_process_group()


def median_us(run, warmup, steps):
    """Calls run() `warmup` times, then `steps` times by the clock; the median in microseconds."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


class Mlp(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        layers = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x):
        return self.layers(x)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


class FashionCnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.layer2 = nn.Sequential(nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2))
        self.fc1 = nn.Linear(64 * 6 * 6, 600)
        self.drop = nn.Dropout(0.25)
        self.fc2 = nn.Linear(600, 120)
        self.fc3 = nn.Linear(120, 10)

    def forward(self, x):
        x = self.fc1(self.layer2(self.layer1(x)).flatten(1))
        return self.fc3(self.fc2(self.drop(x)))


# name: (how to make it, shape of a sample, outputs, mean squared error instead of cross-entropy)
MODELS = {
    "mlp": (lambda: Mlp([784, 128, 64, 10]), (784,), 10, False),
    "wide": (lambda: Mlp([784] * 7 + [10]), (784,), 10, False),
    "convnet": (ConvNet, (1, 28, 28), 10, False),
    "fashion-cnn": (FashionCnn, (1, 28, 28), 10, False),
    "linear": (lambda: nn.Linear(20, 1), (20,), 1, True),
}


def chain(module):
    """The module as layers, of which each takes the output of the one before it."""
    if isinstance(module, Mlp):
        return list(module.layers)
    if isinstance(module, ConvNet):
        return [*module.layer1, *module.layer2, nn.Flatten(), module.fc]
    if isinstance(module, FashionCnn):
        return [*module.layer1, *module.layer2, nn.Flatten(), module.fc1, module.drop, module.fc2, module.fc3]
    return [module]


def blocks(module):
    """The layers that have parameters: what fully_shard is given one by one."""
    return [layer for layer in chain(module) if layer is not module and any(True for _ in layer.parameters())]


def balanced_cuts(layers, stages):
    """Where to cut a chain so that the stages have about as many parameters each: `stages` + 1 indices."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    cuts, done = [0], 0
    for index, size in enumerate(sizes):
        if done >= sum(sizes) * len(cuts) / stages and len(cuts) < stages:
            cuts.append(index)
        done += size
    return cuts + [len(layers)]


def read_idx(folder, name):
    """A file of MNIST, plain or compressed, as a uint8 tensor; held in memory once."""
    path = pathlib.Path(folder) / name
    with (open(path, "rb") if path.exists() else gzip.open(path.with_name(name + ".gz"))) as file:
        dimensions = file.read(4)[3]
        shape = [int.from_bytes(file.read(4), "big") for _ in range(dimensions)]
        content = bytearray(math.prod(shape))
        if file.readinto(content) != len(content):
            raise EOFError(f"{path} is cut short")
    return torch.frombuffer(content, dtype=torch.uint8).reshape(shape)


class Mnist(torch.utils.data.Dataset):
    """MNIST with transforms a sample at a time: what torchvision's data set does with ToTensor and
    Normalize, without its way through an image object (and so a little faster)."""

    def __init__(self, folder, part):
        prefix = "train" if part == "train" else "t10k"
        self.images = read_idx(folder, f"{prefix}-images-idx3-ubyte")
        self.labels = read_idx(folder, f"{prefix}-labels-idx1-ubyte").long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].unsqueeze(0).to(torch.float32).div(255)
        return image.sub_(0.1307).div_(0.3081), int(self.labels[index])
