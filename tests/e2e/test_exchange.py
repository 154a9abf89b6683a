"""Models and weights that come from Python and go back: TorchScript, new output layers, frozen parameters. And
--devices auto."""

import copy
import json
import os
import random
import re
import shutil
import sys
import unittest

import lockstep_testing as t

sys.path.insert(0, str(t.SOURCE_DIR / "tests/interop"))

HAS_TORCH = t.torch_is_the_linked_one()
NO_TORCH = "Python's torch is not the LibTorch that is linked"
FEW_STEPS = ("--dataset", "digits", "--max-epochs", 1, "--limit-train-batches", 4, "--limit-val-batches", 1)


def train(*flags, **kwargs):
    return t.run(t.LOCKSTEP, "train", *([] if "--threads" in flags else ["--threads", 1]), *flags, **kwargs)


def last_line(result):
    return result.stdout.rstrip("\n").split("\n")[-1]


class Exchange(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(t.temporary_folder())

    def refuse(self, flags, *words):
        result = train(*flags, check=False)
        self.assertEqual(result.returncode, 2, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def cifar10(self):
        rng = random.Random(3)
        for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
            records = b"".join(bytes([rng.randrange(10)]) + rng.randbytes(3072) for _ in range(4))
            (self.folder / f"{name}.bin").write_bytes(records)
        return ["--dataset", "cifar10", "--data-dir", self.folder]

    def script(self):
        """A TorchScript file of a network with dropout and statistics."""
        import torch
        from torch import nn

        torch.manual_seed(1)
        net = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5),
                            nn.Linear(32, 10))
        path = self.folder / "net.pt"
        torch.jit.script(net).save(path)
        return net, path


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Scripts(Exchange):
    def test_a_trained_script_is_a_script_again(self):
        import torch
        from safetensors.torch import load_file

        net, path = self.script()
        before = path.read_bytes()
        for strategy in ("ddp", "fsdp"):
            with self.subTest(strategy):
                saved, weights = self.folder / f"{strategy}.pt", self.folder / f"{strategy}.safetensors"
                flags = ["--model", path, *FEW_STEPS[:-2], "--devices", 2, "--strategy", strategy, "--freeze", "1.*"]
                outcome = last_line(train(*flags, "--save-model", saved, "--save-weights", weights))
                self.assertEqual(path.read_bytes(), before)
                loaded = torch.jit.load(saved)
                self.assertFalse(loaded.training)
                wanted = load_file(weights)
                state = loaded.state_dict()
                self.assertEqual(list(state), list(net.state_dict()))
                for name, tensor in wanted.items():
                    self.assertTrue(torch.equal(tensor, state[name]), name)
                self.assertTrue(torch.equal(state["1.weight"], net[1].weight))
                self.assertFalse(torch.equal(state["5.weight"], net[5].weight))
                self.assertEqual(int(state["2.num_batches_tracked"]), 4)
                # Python's own module of these weights says the same.
                net_again = copy.deepcopy(net)
                net_again.load_state_dict(wanted)
                x = torch.randn(3, 1, 28, 28)
                self.assertTrue(torch.equal(loaded(x), net_again.eval()(x)))
                # torch::jit::load in C++ takes it, and tests it to the same outcome.
                again = train("--model", saved, "--dataset", "digits", "--max-epochs", 0, "--devices", 2)
                self.assertEqual(last_line(again), outcome)
                # As eval does, without --load-weights.
                tested = t.run(t.LOCKSTEP, "eval", "--model", saved, "--dataset", "digits", "--devices", 2, "--threads", 1)
                self.assertEqual(last_line(tested), outcome)

    def test_it_may_replace_its_own_file(self):
        import torch

        net, path = self.script()
        train("--model", path, *FEW_STEPS, "--save-model", path)
        self.assertFalse(torch.equal(torch.jit.load(path).state_dict()["1.weight"], net[1].weight))

    def test_what_cannot_be_saved_so(self):
        self.refuse(["--model", "mlp", "--save-model", self.folder / "m.pt"], "the C++ model mlp", "--save-weights")
        _, path = self.script()
        same = self.folder / "same.pt"
        self.refuse(["--model", path, "--save-model", same, "--save-weights", same], "name the same file")
        self.refuse(["--model", path, "--save-model", self.folder / "none" / "m.pt"], "--save-model")


class Frozen(Exchange):
    def weights(self, *flags):
        from safetensors.numpy import load_file

        path = self.folder / "w.safetensors"
        result = train("--model", "mlp", *FEW_STEPS, "--save-weights", path, *flags)
        return load_file(path), result

    def test_with_every_strategy(self):
        """The optimizer has no state of them, and what is trained comes out alike."""
        text = t.run(t.LOCKSTEP, "train", "--help-all").stdout
        strategies = re.search(r"--strategy (\w+(?:\|\w+)+)", text)[1].split("|")
        self.assertIn("fsdp", strategies)
        first, _ = self.weights("--max-epochs", 0)
        expected = None
        for strategy in strategies:
            with self.subTest(strategy):
                batch = {"pipeline": 32, "dp": 32}.get(strategy, 16)  # the same samples in a step
                ranks = 1 if strategy == "dp" else 2
                run = self.folder / f"run-{strategy}"
                found, result = self.weights("--strategy", strategy, "--devices", ranks, "--optimizer", "adam",
                                             "--batch-size", batch, "--freeze", "layers.0.*,layers.2.bias",
                                             "--checkpoint-dir", run)
                self.assertIn("100,544 of them frozen", result.stdout + result.stderr)
                for name in first:
                    frozen = name.startswith("layers.0.") or name == "layers.2.bias"
                    self.assertEqual((found[name] == first[name]).all(), frozen, name)
                names = t.run(t.LOCKSTEP, "checkpoint", "inspect", next(run.glob("step-*")), "--json").stdout
                # By number: 0 and 1 are layers.0's, 3 is layers.2.bias.
                states = {int(n) for n in re.findall(r"exp_avg\.(\d+)", names)}
                self.assertEqual(states, {2, 4, 5} if states else set(), names)
                if strategy in ("ddp", "zero1", "zero2", "fsdp"):
                    expected = expected or found
                    for name in first:
                        self.assertLess(abs(found[name] - expected[name]).max(), 1e-5, name)

    def test_goes_on_with_others_frozen(self):
        flags = ("--model", "mlp", *FEW_STEPS[:2], "--limit-train-batches", 4, "--checkpoint-dir", self.folder / "run")
        train(*flags, "--max-epochs", 1, "--freeze", "layers.0.*")
        result = train(*flags, "--max-epochs", 2, "--resume", "auto")
        self.assertIn("--freeze", result.stderr)

    def test_patterns_that_match_nothing_or_all(self):
        self.refuse(["--model", "mlp", "--freeze", "layer.0.*"], "no parameter whose name matches 'layer.0.*'",
                    "its names are like layers.0.weight and ")
        self.refuse(["--model", "mlp", "--freeze", "layers.*"], "nothing is left to train")
        self.refuse(["--model", "mlp", "--freeze", ""], "--freeze is empty")


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class NewHead(Exchange):
    def test_of_a_resnet_from_python(self):
        import parity_models
        import torch

        model = parity_models.make("resnet18", 5)
        torch.save(model.state_dict(), self.folder / "resnet18.pt")
        out = self.folder / "out.pt"
        flags = ["--model", "resnet18", *self.cifar10(), "--load-weights", self.folder / "resnet18.pt", "--batch-size", 4]
        result = train(*flags, "--max-epochs", 1, "--limit-train-batches", 2, "--freeze", "conv1.*,layer*",
                       "--save-weights", out)
        self.assertIn("a new output layer for 10 classes begins: fc.weight, fc.bias", result.stderr)
        mine = parity_models.make("resnet18:classes=10", 5)
        mine.load_state_dict(torch.load(out))
        for name, parameter in model.named_parameters():
            if name.startswith(("conv1.", "layer")):
                self.assertTrue(torch.equal(parameter, mine.get_parameter(name)), name)
        self.assertFalse(torch.equal(model.bn1.weight, mine.bn1.weight))
        # Not where predictions of a trained layer are asked for, and not where more differs.
        wrong = t.run(t.LOCKSTEP, "eval", *flags[:6], "--load-weights", self.folder / "resnet18.pt", check=False)
        self.assertEqual(wrong.returncode, 1, wrong.stderr)
        self.assertIn("fc.weight", wrong.stderr)
        torch.save({**model.state_dict(), "conv1.weight": torch.zeros(32, 3, 7, 7)}, self.folder / "resnet18.pt")
        self.assertIn("conv1.weight", train(*flags, check=False).stderr)


class Devices(Exchange):
    def test_auto(self):
        flags = ("--model", "mlp", *FEW_STEPS, "--accelerator", "cpu", "--devices", "auto")
        one = min(os.sched_getaffinity(0))
        if shutil.which("taskset"):
            out = t.run("taskset", "-c", one, t.LOCKSTEP, "train", *flags).stdout
            self.assertIn("1 rank on cpu", out)
        ranks = int(re.search(r"(\d+) ranks? (?:over|on)", train(*flags).stdout)[1])
        cores = json.loads(t.run(t.LOCKSTEP, "env", "--json").stdout)["cpu"]["usable_cores"]
        self.assertTrue(ranks == cores or ranks <= 8 < cores, (ranks, cores))
        # A rank of a launcher takes the launcher's number, without a word.
        under = t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, t.LOCKSTEP, "train", *flags)
        self.assertIn("2 ranks over", under.stdout)
        self.assertNotIn("ignored", under.stderr)
        config = self.folder / "run.toml"
        config.write_text('devices = "auto"\n')
        self.assertIn(f"{ranks} rank", train(*flags[:-2], "--config", config).stdout)
        for wrong in ("many", 0, -1):
            self.refuse(("--devices", wrong), "--devices")


if __name__ == "__main__":
    t.main()
