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
    """Joins the group of the other ranks; the launcher's variables give rank and size. For the backend "alone" the
    rank is a group of its own."""
    if config["backend"] == "alone":
        dist.init_process_group("lockstep", init_method=f"{config['init_method']}.{os.environ['RANK']}", rank=0,
                                world_size=1)
        return
    dist.init_process_group(config["backend"], init_method=config["init_method"],
                            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def device(config):
    return torch.device("cuda" if config["backend"] == "nccl" else "cpu")


def write_result(config, result):
    if int(os.environ.get("RANK", 0)) == 0:
        pathlib.Path(config["result"]).write_text(json.dumps(result))


def finish(config, result):
    """Writes the result, and ends the process. All ranks wait until it is written. A Gloo group that Python destroys can
    wait for ever: it holds the lock of the interpreter while it joins a thread that wants it (PyTorch 2.13)."""
    write_result(config, result)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def median_us(run, warmup, steps):
    """Calls run() `warmup` times, then `steps` times by the clock; the median in microseconds."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
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


class GptBlock(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(channels)
        self.c_attn = nn.Linear(channels, 3 * channels)
        self.c_proj = nn.Linear(channels, channels)
        self.ln_2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def attend(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
                   for part in self.c_attn(x).split(c, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GptEmbedding(nn.Module):
    def __init__(self, vocabulary, context, channels):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, channels)
        self.wpe = nn.Embedding(context, channels)

    def forward(self, tokens):
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))


def make_gpt(vocabulary=65, context=128, layers=6, heads=6, channels=384, **_):
    """nanoGPT's, with a head of its own; a chain, so that pipelines and shards can cut it."""
    return nn.Sequential(GptEmbedding(vocabulary, context, channels),
                         *[GptBlock(channels, heads) for _ in range(layers)],
                         nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, vocabulary, bias=False)))


class ResNetBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = self.bn2(self.conv2(torch.relu_(self.bn1(self.conv1(x)))))
        out += self.downsample(x) if self.downsample else x
        return torch.relu_(out)


def make_resnet18(classes=1000):
    blocks = []
    for stage in range(4):
        outputs = 64 << stage
        blocks += [ResNetBlock(64 if stage == 0 else outputs // 2, outputs, 1 if stage == 0 else 2),
                   ResNetBlock(outputs, outputs, 1)]
    return nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
                         nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(512, classes))


# name: (how to make it, shape of a sample, outputs, mean squared error instead of cross-entropy)
MODELS = {
    "mlp": (lambda: Mlp([784, 128, 64, 10]), (784,), 10, False),
    "wide": (lambda: Mlp([784] * 7 + [10]), (784,), 10, False),
    "convnet": (ConvNet, (1, 28, 28), 10, False),
    "fashion-cnn": (FashionCnn, (1, 28, 28), 10, False),
    "linear": (lambda: nn.Linear(20, 1), (20,), 1, True),
}


NAMES = [*MODELS, "gpt", "resnet18"]


class Task:
    """A model by its name and sizes, as `--model` has them, with a batch and a loss for it."""

    def __init__(self, name):
        self.name, _, sizes = name.partition(":")
        self.sizes = {key: int(value) for key, _, value in (part.partition("=") for part in sizes.split(",") if part)}
        self.outputs, self.regression = self.sizes.get("classes", 1000), False
        if self.name == "gpt":
            self.outputs = self.sizes.get("vocabulary", 65)
        elif self.name in MODELS:
            _, self.shape, self.outputs, self.regression = MODELS[self.name]

    def make(self):
        if self.name == "gpt":
            return make_gpt(**self.sizes)
        return make_resnet18(**self.sizes) if self.name == "resnet18" else MODELS[self.name][0]()

    def batch(self, samples):
        """Inputs and targets."""
        if self.name == "gpt":
            shape = (samples, self.sizes.get("context", 128))
            return torch.randint(self.outputs, shape), torch.randint(self.outputs, shape)
        x = torch.rand(samples, *(self.shape if self.name in MODELS else (3, 224, 224)))
        return x, torch.rand(samples, self.outputs) if self.regression else torch.randint(self.outputs, (samples,))

    def loss(self, output, target):
        if self.regression:
            return nn.functional.mse_loss(output, target)
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def make_optimizer(name, parameters):
    """With the rates of ours; else PyTorch's defaults."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop,
             "adagrad": torch.optim.Adagrad}
    return kinds[name](parameters)


def chain(module):
    """The module as layers, of which each takes the output of the one before it."""
    if isinstance(module, nn.Sequential):
        return list(module)
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
