"""`lockstep train` of gpt, resnet18 and TorchScript files, on texts, CIFAR-10 and folders of images."""

import random
import re
import unittest

import lockstep_testing as t
from png_testing import png

OUTCOME = re.compile(r"test accuracy (\d\.\d{4}) loss (\d+\.\d{4})")
SMALL_GPT = "gpt:layers=1,heads=2,channels=32,context=16"
HAS_TORCH = t.torch_is_the_linked_one()
NO_TORCH = "Python's torch is not the LibTorch that is linked"


def train(*flags, **kwargs):
    return t.run(t.LOCKSTEP, "train", "--threads", 1, *flags, **kwargs)


def last_line(result):
    return result.stdout.rstrip("\n").split("\n")[-1]


class Models(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(t.temporary_folder())
        self.random = random.Random(2)

    def refuse(self, flags, *words):
        result = train(*flags, check=False)
        self.assertEqual(result.returncode, 2, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def text(self, size=6000):
        """Words whose letters follow from those before them, all but the first."""
        path = self.folder / "text.txt"
        path.write_text("".join(self.random.choice(["alpha ", "beta ", "gamma\n"]) for _ in range(size // 6)))
        return f"text:{path}"

    def cifar10(self, images=6):
        for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
            records = b"".join(bytes([self.random.randrange(10)]) + self.random.randbytes(3072) for _ in range(images))
            (self.folder / f"{name}.bin").write_bytes(records)
        return ["--dataset", "cifar10", "--data-dir", self.folder]

    def images(self):
        """Dark ones of one class, bright ones of another."""
        for label, shade in (("dark", 40), ("bright", 200)):
            for part, count in (("train", 8), ("val", 4)):
                folder = self.folder / "images" / part / label
                folder.mkdir(parents=True)
                for i in range(count):
                    pixels = bytes(shade + self.random.randrange(40) for _ in range(40 * 36 * 3))
                    (folder / f"{i}.png").write_bytes(png(40, 36, pixels))
        return f"folder:{self.folder / 'images'}"

    def test_gpt_learns_a_text_goes_on_and_is_evaluated(self):
        flags = ["--model", SMALL_GPT, "--dataset", self.text(), "--optimizer", "adamw", "--lr", 0.01, "--devices", 2,
                 "--batch-size", 8]
        whole = train(*flags, "--max-epochs", 4, "--save-weights", self.folder / "w.safetensors")
        accuracy = float(OUTCOME.fullmatch(last_line(whole))[1])
        # One letter in about five begins a word and cannot be foreseen.
        self.assertGreater(accuracy, 0.6)
        saved = [*flags, "--checkpoint-dir", self.folder / "runs"]
        train(*saved, "--max-epochs", 2)
        self.assertEqual(last_line(train(*saved, "--max-epochs", 4, "--resume", "auto")), last_line(whole))
        again = t.run(t.LOCKSTEP, "eval", *flags[:4], "--load-weights", self.folder / "w.safetensors")
        self.assertEqual(last_line(again), last_line(whole))

    def test_resnet18_learns_cifar10_with_augmentation(self):
        result = train("--model", "resnet18", *self.cifar10(), "--batch-size", 4, "--max-epochs", 1, "--augment",
                       "--limit-train-batches", 2, "--limit-val-batches", 1)
        self.assertRegex(last_line(result), OUTCOME)
        self.refuse(["--model", "resnet18:classes=4", *self.cifar10(), "--batch-size", 4],
                    "the model tells 4 classes apart, the dataset has 10")

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_a_torchscript_file_learns_a_folder_of_images(self):
        import torch

        net = torch.nn.Sequential(torch.nn.AvgPool2d(8), torch.nn.Flatten(), torch.nn.BatchNorm1d(3 * 16),
                                  torch.nn.Linear(3 * 16, 2))
        path = self.folder / "net.pt"
        torch.jit.script(net).save(path)
        weights = self.folder / "w.safetensors"
        flags = ["--model", path, "--dataset", self.images(), "--image-size", 32, "--batch-size", 4]
        result = train(*flags, "--max-epochs", 3, "--devices", 2, "--num-workers", 1, "--save-weights", weights)
        self.assertGreater(float(OUTCOME.fullmatch(last_line(result))[1]), 0.99)
        # Back in Python: names and shapes are those of the module, and the statistics were learned.
        from safetensors.torch import load_file

        net.load_state_dict(load_file(weights))
        self.assertEqual(int(net[2].num_batches_tracked), 6)

    def test_an_image_that_cannot_be_read_stops_the_run_at_its_start_or_is_skipped(self):
        flags = ["--model", "resnet18", "--dataset", self.images(), "--image-size", 32, "--batch-size", 4, "--max-epochs", 1]
        self.refuse(["--model", "convnet", *flags[2:]], "--model resnet18")
        (self.folder / "images" / "train" / "dark" / "3.png").write_bytes(b"")
        whole = self.folder / "images" / "val" / "bright" / "1.png"
        whole.write_bytes(whole.read_bytes()[:-100])
        for devices in (1, 2):
            result = train(*flags, "--devices", devices, check=False)
            self.assertEqual((result.returncode, result.stdout), (1, ""), result.stderr)
            self.assertRegex(result.stderr, r"dark/3\.png|bright/1\.png")
            self.assertIn("--on-bad-image skip", result.stderr)
        result = train(*flags, "--devices", 2, "--on-bad-image", "skip")
        self.assertRegex(last_line(result), OUTCOME)
        for name in ("dark/3.png", "bright/1.png"):
            self.assertIn(name, result.stderr)

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_a_torchscript_file_that_does_not_fit(self):
        import torch

        def script(name, *layers):
            torch.jit.script(torch.nn.Sequential(*layers)).save(self.folder / name)
            return ["--model", self.folder / name, "--dataset", "digits"]

        flat = torch.nn.Flatten()
        self.refuse(script("few.pt", flat, torch.nn.Linear(784, 5)), "the model gives Float [2, 5], expected [2, 10]")
        self.refuse(script("rows.pt", torch.nn.Linear(784, 10)), "cannot take a batch [2, 1, 28, 28] of Float",
                    "begin it with Flatten")
        train(*script("more.pt", flat, torch.nn.Linear(784, 12)), "--limit-train-batches", 2, "--max-epochs", 1)
        torch.save({"weight": torch.zeros(2)}, self.folder / "weights.pt")
        self.refuse(["--model", self.folder / "weights.pt"], "is no TorchScript", "--load-weights as they are")
        self.refuse(["--model", self.folder / "none.pt"], "there is no such file")

    def test_models_and_data_that_do_not_fit(self):
        text = self.text(3000)
        self.refuse(["--model", "mlp", "--dataset", text], "the dataset is a text, which the model does not take")
        self.refuse(["--model", "gpt", "--dataset", "digits"], "the model takes tokens of a text, the dataset is none",
                    "text:FILE")
        self.refuse(["--model", "resnet18", "--dataset", "digits"], "takes images of 3 channels")
        self.refuse(["--model", "gpt:heads=5", "--dataset", text], "384 channels cannot be shared by 5 heads")
        self.refuse(["--model", "gpt:vocabulary=3", "--dataset", text], "the model tells 3 classes apart")
        self.refuse(["--model", SMALL_GPT, "--dataset", text, "--augment"], "--augment is for images of bytes")
        result = train("--model", "gpt", "--dataset", self.text(300), check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn("characters; expected at least 129", result.stderr)


if __name__ == "__main__":
    t.main()
