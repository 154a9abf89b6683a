"""Texts, CIFAR-10 and folders of images: the same samples as programs in Python read."""

import importlib.util
import io
import random
import sys
import unittest

import lockstep_testing as lt
from png_testing import png

TOOL = lt.BUILD_DIR / "tests" / "data_files_tool"

for package in ("torch", "numpy", "safetensors"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: Python's {package} is not installed")
        sys.exit(77)

import numpy
import safetensors.torch
import torch

PARTS = ("data", "targets", "test_data", "test_targets")


class DataSets(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(lt.temporary_folder())
        self.random = random.Random(5)

    def read(self, name):
        out = self.folder / "out.safetensors"
        lt.run(TOOL, "dataset", name, self.folder, 0, out)
        return safetensors.torch.load_file(out)

    def assert_same(self, got, wanted):
        for part, tensor in zip(PARTS, wanted):
            self.assertEqual(got[part].dtype, tensor.dtype, part)
            self.assertEqual(got[part].shape, tensor.shape, part)
            self.assertTrue(torch.equal(got[part], tensor), part)

    def test_text(self):
        """As nanoGPT's prepare.py encodes a text, in windows of 128 characters."""
        words = ["to ", "be ", "or\n", "n\u00f6t ", "\u20ac", "\U0001f600 ", "b\ufeff"]
        text = "".join(self.random.choice(words) for _ in range(4000))
        (self.folder / "a.txt").write_text(text, encoding="utf-8", newline="")
        number = {c: i for i, c in enumerate(sorted(set(text)))}
        tokens = torch.tensor([number[c] for c in text])
        wanted = []
        for part in (tokens[:int(len(text) * 0.9)], tokens[int(len(text) * 0.9):]):
            starts = range(0, len(part) - 128, 128)
            wanted += [torch.stack([part[i:i + 128] for i in starts]), torch.stack([part[i + 1:i + 129] for i in starts])]
        self.assert_same(self.read(f"text:{self.folder / 'a.txt'}"), wanted)

    def test_cifar10(self):
        """As its own page describes the binary version."""
        files = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
        parts = []
        for file in files:
            records = numpy.frombuffer(self.random.randbytes(4 * 3073), dtype=numpy.uint8).reshape(4, 3073).copy()
            records[:, 0] %= 10
            records.tofile(self.folder / file)
            parts.append(torch.from_numpy(records))
        train, test = torch.cat(parts[:5]), parts[5]
        self.assert_same(self.read("cifar10"), [
            train[:, 1:].reshape(-1, 3, 32, 32), train[:, 0].long(), test[:, 1:].reshape(-1, 3, 32, 32), test[:, 0].long()])

    def image(self, width, height):
        return torch.tensor(list(self.random.randbytes(3 * width * height)), dtype=torch.uint8).reshape(height, width, 3)

    def write(self, name, image):
        path = self.folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width, _ = image.shape
        path.write_bytes(png(width, height, bytes(image.flatten().tolist())))

    @staticmethod
    def resized_and_cropped(image):
        """torchvision.transforms.v2: Resize(256), CenterCrop(224) of a tensor."""
        height, width, _ = image.shape
        short, long = min(width, height), max(width, height)
        size = (256, int(256 * long / short)) if height <= width else (int(256 * long / short), 256)
        pixels = image.permute(2, 0, 1).unsqueeze(0).contiguous()
        if size != (height, width):
            pixels = torch.nn.functional.interpolate(pixels, size, mode="bilinear", antialias=True)
        top, left = (int(round((side - 224) / 2.0)) for side in size)
        return pixels[0, :, top:top + 224, left:left + 224]

    def test_folder_of_images(self):
        shapes = {"cat/1.png": (300, 260), "cat/2.png": (400, 257), "dog/1.png": (101, 350), "dog/x/3.png": (256, 256)}
        images = {name: self.image(*shape) for name, shape in shapes.items()}
        for name, image in images.items():
            self.write("train/" + name, image)
            self.write("val/" + name, image)
        data = torch.stack([self.resized_and_cropped(image) for image in images.values()])
        labels = torch.tensor([0, 0, 1, 1])
        self.assert_same(self.read(f"folder:{self.folder / 'images'}"), [data, labels, data, labels])

    @unittest.skipUnless(importlib.util.find_spec("PIL"), "Python's Pillow is not installed")
    def test_decoded_as_by_pillow(self):
        from PIL import Image

        wanted = []
        modes = ("RGB", "L", "CMYK", "RGBA", "P", "LA", "1", "I;16")
        for i, mode in enumerate(modes):
            # Smooth, as photographs are; of the size that is cut out, so that nothing is scaled.
            image = Image.fromarray(self.image(16, 16).numpy()).resize((256, 256)).convert("L" if mode == "I;16" else mode)
            if mode == "I;16":
                image = Image.fromarray(numpy.asarray(image).astype("uint16") * 3)
            for kind in ("png", "jpeg") if mode in ("RGB", "L") else ("jpeg",) if mode == "CMYK" else ("png",):
                content = io.BytesIO()
                image.save(content, kind)
                name = f"{i}.{kind}"
                for part in ("train", "test"):
                    path = self.folder / "images" / part / "a" / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.getvalue())
                wanted.append((name, numpy.asarray(Image.open(content).convert("RGB"))))
        pixels = torch.stack([torch.tensor(image) for _, image in sorted(wanted)]).permute(0, 3, 1, 2)
        got = self.read(f"folder:{self.folder / 'images'}")["data"]
        self.assertTrue(torch.equal(got, pixels[:, :, 16:240, 16:240]))


if __name__ == "__main__":
    lt.main()
