"""Checkpoints that Python writes and we read, and the other way round."""

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import unittest

import lockstep_testing as t
import torch_forks

for package in ("torch", "safetensors"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: Python's {package} is not installed")
        sys.exit(77)

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file, save_model
from torch.distributed.checkpoint.state_dict import get_state_dict

TOOL = t.BUILD_DIR / "tests" / "data_files_tool"
WRITER = t.SOURCE_DIR / "tests" / "interop" / "checkpoint_writer.py"
LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
SIZES = (1, 2, 4) if LONG else (2, 4)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def run_writer(world_size, folder, *more):
    """checkpoint_writer.py as a job of this many ranks."""
    (folder / "meeting").unlink(missing_ok=True)
    python = torch_forks.python("torch.distributed.checkpoint", "torch.distributed.tensor")
    ranks = [
        subprocess.Popen([str(word) for word in (*python, WRITER, rank, world_size, folder / "meeting", folder, *more)],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=t.clean_environment())
        for rank in range(world_size)
    ]
    try:
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=200)
            if process.returncode != 0:
                raise AssertionError(f"Python's rank {rank} failed:\n{output}")
    finally:
        for process in ranks:
            process.kill()
            process.wait()


class Checkpoints(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = cls.enterClassContext(t.temporary_folder())
        for world_size in SIZES:
            (cls.folder / str(world_size)).mkdir()
            run_writer(world_size, cls.folder / str(world_size))

    def setUp(self):
        self.scratch = self.enterContext(t.temporary_folder())

    def assert_same(self, got, wanted):
        self.assertEqual(set(got), set(wanted))
        for name, tensor in wanted.items():
            self.assertEqual(got[name].dtype, tensor.dtype, name)
            self.assertEqual(got[name].shape, tensor.shape, name)
            self.assertTrue(torch.equal(bits(got[name]), bits(tensor)), name)

    def test_what_python_wrote_is_read_whole_and_in_parts(self):
        wanted_of = {"dcp": "dcp", "hf_sharded": "files", "hf_consolidated": "consolidated", "hf_files": "whole",
                     "whole.pt": "whole", "whole.safetensors": "whole"}
        for world_size in SIZES:
            for name, wanted in wanted_of.items():
                with self.subTest(world_size=world_size, name=name):
                    folder, out = self.folder / str(world_size), self.scratch / "out.safetensors"
                    t.run(TOOL, "source", folder / name, out)
                    self.assert_same(load_file(out), load_file(folder / f"{wanted}.safetensors"))

    def damage(self, folder, file, rounds):
        """How many damages of a file are refused, give the same tensors, and give others."""
        seed = os.environ.get("LOCKSTEP_TEST_SEED", str(int.from_bytes(os.urandom(4), "little")))
        print(f"{file}: seed {seed} (set LOCKSTEP_TEST_SEED to repeat)")
        result = t.run(TOOL, "corrupt", folder, file, rounds, seed, timeout=3000)
        return [int(word) for word in result.stdout.split()]

    def test_damage_is_found_or_refused(self):
        """Never a crash. What has checksums never gives other tensors."""
        rounds = 145_000 if LONG else 725
        four = self.folder / "4"
        for folder, file, has_checksums in ((four / "dcp", ".metadata", False), (four / "dcp", "__3_0.distcp", True),
                                            (four / "whole.pt", "", True), (four / "whole.safetensors", "", False),
                                            (four / "hf_sharded", "shard-00004-model-00001-of-00001.safetensors", False),
                                            (four / "hf_files", "model-00002-of-00003.safetensors", False),
                                            (four / "hf_files", "model.safetensors.index.json", False)):
            with self.subTest(file=file):
                refused, same, others = self.damage(folder, file, rounds)
                self.assertEqual(refused + same + others, rounds)
                self.assertGreater(refused, rounds / 10)
                if has_checksums:
                    self.assertEqual(others, 0)

    def test_missing_files_are_named(self):
        for name, file in (("dcp", "__1_0.distcp"), ("hf_sharded", "shard-00001-model-00001-of-00001.safetensors"),
                           ("hf_files", "model-00002-of-00003.safetensors")):
            with self.subTest(name=name):
                copy = self.scratch / name
                shutil.copytree(self.folder / "2" / name, copy)
                (copy / file).unlink()
                failed = t.run(TOOL, "source", copy, self.scratch / "out.safetensors", check=False)
                self.assertEqual(failed.returncode, 1)
                self.assertIn(str(copy), failed.stderr)

    def checkpoint(self, *words, code=0):
        result = t.run(t.LOCKSTEP, "checkpoint", *words, check=False)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result.stdout

    def test_python_reads_what_convert_writes(self):
        folder = self.folder / "2"
        wanted = load_file(folder / "whole.safetensors")
        for source in ("whole.pt", "hf_files"):
            for target in ("out.pt", "out.safetensors", "hf"):
                out = self.scratch / source / target
                out.parent.mkdir(exist_ok=True)
                with self.subTest(source=source, target=target):
                    self.checkpoint("convert", folder / source, out, *(("--to", "hf") if target == "hf" else ()))
                    if target == "hf":
                        run_writer(2, folder, out)
                    read = {"out.pt": lambda: torch.load(out, weights_only=True),
                            "out.safetensors": lambda: load_file(out),
                            "hf": lambda: load_file(folder / "read.safetensors")}[target]
                    self.assert_same(read(), wanted)

    def test_reshard_cuts_into_shards(self):
        """Python reshards what it writes, and so does merge."""
        folder = self.folder / "2"
        wanted = load_file(folder / "whole.safetensors")
        for shards in (1, 3):
            with self.subTest(shards=shards):
                out, merged = self.scratch / f"of {shards}", self.scratch / f"{shards}.safetensors"
                self.checkpoint("reshard", folder / "whole.pt", out, "--shards", shards)
                self.assertEqual(len(list(out.iterdir())), shards)
                run_writer(2, folder, out)
                self.assert_same(load_file(folder / "read.safetensors"), wanted)
                self.checkpoint("merge", out, merged)
                self.assert_same(load_file(merged), wanted)
        self.checkpoint("reshard", folder / "whole.pt", self.scratch / "none", "--shards", 0, code=2)

    def test_merge_joins_shards(self):
        out = self.scratch / "out.safetensors"
        self.checkpoint("merge", self.folder / "4" / "dcp", out)
        self.assert_same(load_file(out), load_file(self.folder / "4" / "dcp.safetensors"))

    def test_inspect_lists_tensors_and_values(self):
        got = json.loads(self.checkpoint("inspect", self.folder / "4" / "dcp", "--json"))
        wanted = load_file(self.folder / "4" / "dcp.safetensors")
        self.assertEqual({row["name"]: (row["dtype"], row["shape"], row["bytes"]) for row in got["tensors"]},
                         {name: (str(tensor.dtype)[6:], list(tensor.shape), tensor.nbytes)
                          for name, tensor in wanted.items()})
        self.assertEqual(got["values"], {"optim.lr": 0.25, "optim.step": 3, "optim.betas.0": 0.5,
                                         "optim.betas.1": 0.75, "optim.name": "adam", "optim.none": None})
        self.assertIn("layers.0.weight", self.checkpoint("inspect", self.folder / "2" / "hf_sharded"))

    def test_diff_names_what_differs(self):
        a = {"same": torch.rand(3), "shape": torch.rand(3), "dtype": torch.rand(2), "value": torch.ones(4), "a": torch.ones(1)}
        b = {"same": a["same"], "shape": torch.rand(4), "dtype": a["dtype"].double(), "value": torch.ones(4), "b": torch.ones(1)}
        b["value"][2] = 1.5
        torch.save(a, self.scratch / "a.pt")
        torch.save(b, self.scratch / "b.pt")
        got = json.loads(self.checkpoint("diff", self.scratch / "a.pt", self.scratch / "b.pt", "--json", code=1))
        self.assertEqual({row["name"]: row["what"] for row in got["differences"]},
                         {"shape": "shape", "dtype": "dtype", "value": "values", "a": "presence", "b": "presence"})
        self.assertIn("0.5", [row["b"] for row in got["differences"] if row["name"] == "value"][0])
        self.checkpoint("diff", self.folder / "4" / "hf_sharded", self.folder / "2" / "files.safetensors")

    def test_verify_names_the_damaged_tensor(self):
        dcp = self.scratch / "dcp"
        shutil.copytree(self.folder / "2" / "dcp", dcp)
        self.checkpoint("verify", dcp)
        content = bytearray((dcp / "__1_0.distcp").read_bytes())
        square = bits(load_file(self.folder / "2" / "dcp.safetensors")["model.square"]).numpy().tobytes()
        content[content.index(square) + 5] ^= 1
        (dcp / "__1_0.distcp").write_bytes(content)
        got = json.loads(self.checkpoint("verify", dcp, "--json", code=1))
        self.assertEqual([row["tensor"] for row in got["damaged"]], ["model.square"])
        line, *hint = self.checkpoint("verify", dcp, code=1).splitlines()
        self.assertIn("model.square", line)
        self.assertEqual((line.count(str(dcp)), [line[:8] for line in hint]), (1, ["  hint: "]))

    def test_verify_names_the_damaged_checkpoint_of_a_run(self):
        run = self.scratch / "run"
        t.run(t.LOCKSTEP, "train", "--dataset", "digits", "--max-epochs", 2, "--limit-train-batches", 2,
              "--limit-val-batches", 1, "--checkpoint-dir", run)
        self.checkpoint("verify", run)
        steps = sorted(run.glob("step-*"))
        file = next(steps[0].glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        got = json.loads(self.checkpoint("verify", run, "--json", code=1))
        self.assertEqual((got["checked"], [row["path"] for row in got["damaged"]]), (len(steps), [str(steps[0])]))
        first, *hint = self.checkpoint("verify", run, code=1).splitlines()
        self.assertEqual((first.count(str(steps[0])), [line[:8] for line in hint]), (1, ["  hint: "]))
        self.assertIn("optimizer.", self.checkpoint("inspect", run))
        shown = json.loads(self.checkpoint("inspect", run, "--json"))
        self.assertEqual((shown["format"], shown["values"]["step"]), ("lockstep", int(steps[1].name[5:])))
        self.assertEqual(self.checkpoint("diff", steps[0], steps[1], code=1), "", "an error, and no differences")
        whole = self.checkpoint("inspect", run / "latest")
        (run / "latest").unlink()  # As on a file system that has no links.
        self.assertEqual(self.checkpoint("inspect", run), whole)
        self.checkpoint("convert", run, self.scratch / "newest.pt")
        self.checkpoint("diff", run, steps[1])

    def test_a_checkpoint_of_a_run_becomes_a_file_of_weights(self):
        run, weights = self.scratch / "run", self.scratch / "model.pt"
        trained = t.run(t.LOCKSTEP, "train", "--dataset", "digits", "--max-epochs", 1, "--limit-train-batches", 2,
                        "--strategy", "zero1", "--devices", 2, "--optimizer", "adam", "--checkpoint-dir", run)
        self.checkpoint("convert", run, weights)
        tested = t.run(t.LOCKSTEP, "eval", "--dataset", "digits", "--load-weights", weights)
        self.assertEqual(tested.stdout.splitlines()[-1], trained.stdout.splitlines()[-1])
        self.checkpoint("convert", weights, weights, code=2)
        file = next((run / "latest").glob("model-*"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        self.checkpoint("convert", run, self.scratch / "damaged.pt", code=1)
        self.assertFalse((self.scratch / "damaged.pt").exists())


class Two(torch.nn.Module):

    def __init__(self, tied=False):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        if tied:
            self.a.weight, self.a.bias = self.b.weight, self.b.bias

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def decay_groups(model):
    """Two groups, as of those who decay weights and not biases."""
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": [p for p in parameters if p.dim() > 1]},
                              {"params": [p for p in parameters if p.dim() < 2]}], lr=0.01, weight_decay=0.1)


def steps_as_ints(optimizer):
    for fields in optimizer["state"].values():
        fields["step"] = int(fields["step"])


def step_in_group(optimizer):
    steps = [int(fields.pop("step")) for fields in optimizer["state"].values()]
    optimizer["param_groups"][0]["step"] = steps[0]


SGD = ("--optimizer", "sgd", "--lr", 0.5, "--momentum", 0.9)
ADAM = ("--optimizer", "adam", "--lr", 0.01)
ADAMW = ("--optimizer", "adamw", "--lr", 0.01, "--weight-decay", 0.1)


class GoesOnFromPython(unittest.TestCase):
    """Python trains 3 steps, saves, and goes on by one. Lockstep takes that step from the file."""

    def setUp(self):
        self.folder = self.enterContext(t.temporary_folder())
        torch.manual_seed(7)
        self.x, self.y = torch.randn(64, 16), torch.arange(64) % 16
        save_file({"x_train": self.x, "y_train": self.y, "x_test": self.x[:16].clone(), "y_test": self.y[:16].clone()},
                  self.folder / "data.safetensors")

    def steps(self, model, optimizer, count):
        for _ in range(count):
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(self.x), self.y).backward()
            optimizer.step()

    def train(self, model, *flags, epochs=1, check=True):
        return t.run(t.LOCKSTEP, "train", "--model", model, "--dataset", f"file:{self.folder / 'data.safetensors'}",
                     "--batch-size", 64, "--max-epochs", epochs, *flags, check=check)

    def assert_close(self, got, wanted):
        self.assertEqual(set(got), set(wanted))
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=name)

    def start(self, make, change, frozen):
        torch.manual_seed(5)
        model = Two()
        for parameter in model.a.parameters():
            parameter.requires_grad_(not frozen)
        torch.jit.script(model).save(self.folder / "two.pt")
        optimizer = make(model)
        self.steps(model, optimizer, 3)
        state = copy.deepcopy(optimizer.state_dict())
        change(state)
        return model, optimizer, state

    def check(self, make, flags, change=lambda state: None, frozen=False, wrap=lambda name: name, as_dcp=False):
        model, optimizer, state = self.start(make, change, frozen)
        start = self.folder / "start"
        if as_dcp:
            shutil.rmtree(start, ignore_errors=True)
            weights, state = copy.deepcopy(get_state_dict(model, optimizer))
            change(state)
            dcp.save({"app": {"model": weights, "optim": state}}, checkpoint_id=start, no_dist=True)
        else:
            start = self.folder / "start.pt"
            torch.save({"model": {wrap(name): value for name, value in model.state_dict().items()},
                        "optimizer": state}, start)
        self.steps(model, optimizer, 1)
        out = self.folder / "out.safetensors"
        self.train(self.folder / "two.pt", "--load-weights", start, "--load-optimizer", start, *flags, "--save-weights", out)
        self.assert_close(load_file(out), model.state_dict())

    def test_an_optimizer_of_the_trained_parameters(self):
        of_b = lambda model: sgd(model.b.parameters())
        with self.subTest("frozen in the file"):
            self.check(of_b, SGD, frozen=True)
        with self.subTest("frozen by a flag"):
            self.check(of_b, (*SGD, "--freeze", "a.*"))
        with self.subTest("all, of which some are frozen"):
            self.check(lambda model: sgd(model.parameters()), SGD, frozen=True)
        with self.subTest("nobody can know which"):
            _, _, state = self.start(of_b, lambda state: None, frozen=False)
            torch.save(state, self.folder / "start.pt")
            refused = self.train(self.folder / "two.pt", *SGD, "--load-optimizer", self.folder / "start.pt", check=False)
            self.assertEqual(refused.returncode, 1, refused.stderr)
            self.assertIn("--freeze", refused.stderr)

    def test_parameters_told_by_name(self):
        for prefix, middle in (("module.", ""), ("_orig_mod.module.", ""), ("module._orig_mod.", ""), ("model.", ""),
                               ("", "_orig_mod."), ("module.", "_checkpoint_wrapped_module.")):
            with self.subTest(prefix=prefix, middle=middle):
                wrap = lambda name: prefix + name.replace(".", f".{middle}")
                # Of another order, which only the names tell.
                self.check(lambda model: sgd([(wrap(name), p) for name, p in reversed([*model.named_parameters()])]), SGD,
                           wrap=wrap)

    def test_steps_that_are_no_tensors(self):
        for make, flags in ((adam, ADAM), (lambda p: torch.optim.RMSprop(p, lr=0.01), ("--optimizer", "rmsprop", "--lr", 0.01)),
                            (lambda p: torch.optim.Adagrad(p, lr=0.01), ("--optimizer", "adagrad", "--lr", 0.01))):
            with self.subTest(flags=flags):
                self.check(lambda model: make(model.parameters()), flags, steps_as_ints)
        of_all = lambda model: adam(model.parameters())
        self.check(of_all, ADAM, step_in_group)
        self.check(of_all, ADAM, steps_as_ints, as_dcp=True)

    def test_an_optimizer_without_a_state(self):
        self.check(lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                   ("--optimizer", "sgd", "--lr", 0.1, "--momentum", 0))

    def test_two_groups_whose_state_has_names(self):
        self.check(decay_groups, ADAMW, as_dcp=True)

    def test_tied_weights(self):
        """They stay one parameter in TorchScript, and come back from what Python wrote under one name."""
        torch.manual_seed(9)
        model = Two(tied=True)
        torch.jit.script(model).save(self.folder / "tied.pt")
        plain = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
        flags = ("--optimizer", "sgd", "--lr", 0.1, "--momentum", 0)
        out = self.folder / "out.safetensors"
        self.steps(model, plain(), 3)
        save_model(model, self.folder / "tied.safetensors")
        self.steps(model, plain(), 3)
        self.train(self.folder / "tied.pt", *flags, "--save-model", self.folder / "3.pt", epochs=3)
        saved = torch.jit.load(self.folder / "3.pt")
        self.assertEqual(saved.a.weight.data_ptr(), saved.b.weight.data_ptr())
        self.train(self.folder / "3.pt", *flags, "--save-weights", out, epochs=3)
        self.assert_close(load_file(out), model.state_dict())
        self.train(self.folder / "tied.pt", *flags, "--load-weights", self.folder / "tied.safetensors",
                   "--save-weights", out, epochs=3)
        self.assert_close(load_file(out), model.state_dict())
        t.run(t.LOCKSTEP, "checkpoint", "convert", self.folder / "tied.safetensors", self.folder / "converted.pt")
        model.load_state_dict(torch.load(self.folder / "converted.pt"))


if __name__ == "__main__":
    t.main()
