"""Sampler, transforms and loader against Python's torch: same indices, same bits."""

import importlib.util
import itertools
import json
import sys
import tempfile
import unittest

import lockstep_testing as lt

PROBE = lt.BUILD_DIR / "tests" / "data_probe"

for package in ("torch", "numpy", "safetensors"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: Python's {package} is not installed")
        sys.exit(77)

import numpy
import safetensors.torch
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def sampler_questions():
    """Small worlds in every combination, then sizes, seeds and epochs of real jobs."""
    keys = ("dataset_size", "world_size", "shuffle", "drop_last", "seed", "epoch")
    grids = [
        itertools.product((1, 2, 3, 5, 8, 23), (1, 2, 3, 4, 7, 30), (True, False), (True, False), (0, 7), (0, 1, 9)),
        itertools.product((1000, 60000), (1, 3), (True,), (True, False), (0, 2**31, 2**63 + 5), (0, 250)),
    ]
    for values in itertools.chain(*grids):
        question = dict(zip(keys, values))
        ranks = range(question["world_size"])
        if question["world_size"] > 8:
            ranks = (0, 1, question["world_size"] // 2, question["world_size"] - 1)
        for rank in ranks:
            yield {**question, "rank": rank}


def python_sampler(question):
    sampler = DistributedSampler(range(question["dataset_size"]), question["world_size"], question["rank"],
                                 shuffle=question["shuffle"], seed=question["seed"], drop_last=question["drop_last"])
    sampler.set_epoch(question["epoch"])
    return sampler


class Sampler(unittest.TestCase):
    def test_indices_are_pythons(self):
        questions = list(sampler_questions())
        with tempfile.TemporaryFile("w+") as asked:
            asked.writelines(json.dumps(q) + "\n" for q in questions)
            asked.seek(0)
            answers = lt.run(PROBE, "sampler", stdin=asked).stdout.splitlines()
        self.assertEqual(len(answers), len(questions))
        for question, line in zip(questions, answers):
            answer = json.loads(line)
            sampler = python_sampler(question)
            self.assertEqual(answer["indices"], list(sampler), question)
            self.assertEqual(answer["total_size"], sampler.total_size, question)
            # Positions of the padded list that lie beyond the data set.
            padding = sum(i >= question["dataset_size"]
                          for i in range(question["rank"], sampler.total_size, question["world_size"]))
            self.assertEqual(answer["padding"], padding, question)
        self.assertGreater(len(questions), 3000)


class Images(Dataset):
    """What torchvision's MNIST and CIFAR10 with ToTensor and Normalize do for each sample."""

    def __init__(self, data, targets, mean=None, std=None):
        self.data, self.targets, self.mean, self.std = data, targets, mean, std

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        sample = self.data[index]
        if self.mean is not None:
            sample = sample.view(-1, *sample.shape[-2:]).to(torch.float32).div(255)
            mean = torch.as_tensor(self.mean, dtype=sample.dtype).view(-1, 1, 1)
            std = torch.as_tensor(self.std, dtype=sample.dtype).view(-1, 1, 1)
            sample = sample.sub_(mean).div_(std)
        return sample, self.targets[index]


class Loader(unittest.TestCase):
    def compare(self, data, targets, mean=None, std=None, **options):
        """The probe's batches against a Python DataLoader's, to the last bit."""
        options = {"rank": 0, "world_size": 1, "shuffle": True, "seed": 0, "drop_last": False, "batch_size": 32,
                   "batch_drop_last": False, "num_workers": 0, "epochs": [0, 1, 5], **options}
        if mean is not None:
            options.update(mean=mean, std=std)
        with lt.temporary_folder() as folder:
            safetensors.torch.save_file({"data": data, "targets": targets}, folder / "in.safetensors")
            lt.run(PROBE, "loader", folder / "in.safetensors", folder / "out.safetensors", json.dumps(options))
            got = safetensors.torch.load_file(folder / "out.safetensors")
        sampler = python_sampler({**options, "dataset_size": len(data), "epoch": 0})
        loader = DataLoader(Images(data, targets, mean, std), batch_size=options["batch_size"], sampler=sampler,
                            drop_last=options["batch_drop_last"])
        expected = {}
        for epoch in options["epochs"]:
            sampler.set_epoch(epoch)
            for index, (x, y) in enumerate(loader):
                if index >= options.get("first_batch", 0):
                    expected[f"{epoch}.{index}.data"] = x.flatten(1) if options.get("flatten") else x
                    expected[f"{epoch}.{index}.target"] = y
        self.assertEqual({k for k in got if not k.endswith("padding")}, set(expected))
        for name, tensor in expected.items():
            self.assertEqual(got[name].dtype, tensor.dtype, name)
            self.assertEqual(got[name].shape, tensor.shape, name)
            self.assertEqual(got[name].numpy().tobytes(), tensor.numpy().tobytes(), name)
        self.assertTrue(expected)
        return got

    def setUp(self):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randint(256, (1003, 28, 28), dtype=torch.uint8, generator=generator)
        self.colour = torch.randint(256, (203, 3, 9, 7), dtype=torch.uint8, generator=generator)
        self.features = torch.randn(2048, 20, generator=generator)
        self.values = torch.randn(2048, 1, generator=generator)

    def test_normalized_images(self):
        labels = torch.arange(1003) % 10
        self.compare(self.images, labels, [0.1307], [0.3081], batch_size=64)
        self.compare(self.images, labels, [0.1307], [0.3081], flatten=True, num_workers=2)
        self.compare(self.images, labels, [0.5], [0.5], rank=1, world_size=3, seed=42, batch_drop_last=True)

    def test_one_mean_a_channel(self):
        self.compare(self.colour, torch.arange(203), [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])

    def test_regression(self):
        self.compare(self.features, self.values, rank=1, world_size=2, num_workers=1)

    def test_unshuffled_with_padding(self):
        got = self.compare(self.images, torch.arange(1003), rank=3, world_size=4, shuffle=False, batch_size=100)
        paddings = {name: int(value) for name, value in got.items() if name.endswith("padding")}
        self.assertEqual({name for name, value in paddings.items() if value}, {"0.2.padding", "1.2.padding", "5.2.padding"})
        self.assertEqual(max(paddings.values()), 1)

    def test_resumed(self):
        self.compare(self.images, torch.arange(1003), [0.1307], [0.3081], first_batch=20, num_workers=2)

    def test_a_batch_larger_than_the_data(self):
        self.compare(self.colour, torch.arange(203), batch_size=5000)

    def test_real_mnist(self):
        folder = lt.data_dir()
        if folder is None:
            self.skipTest(lt.NO_DATA)
        import gzip

        content = gzip.open(folder / "mnist" / "t10k-images-idx3-ubyte.gz").read()
        images = torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=16).copy()).view(-1, 28, 28)
        self.compare(images, torch.arange(len(images)), [0.1307], [0.3081], batch_size=64, epochs=[3], flatten=True)


if __name__ == "__main__":
    lt.main()
