"""`lockstep train` ends with the weights of the Python script, to the last bit."""

import json
import random
import subprocess
import unittest

import lockstep_testing as t
import torch_forks

SCRIPT = t.SOURCE_DIR / "tests" / "interop" / "ddp_script.py"


def write_idx(path, array):
    header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.tobytes())


def write_digits(folder):
    """Lockstep's built-in digits as files that the script reads."""
    from safetensors.numpy import load_file

    # 0 is what the digits of `lockstep train` are drawn from, whatever its --seed.
    t.run(t.BUILD_DIR / "tests" / "data_files_tool", "dataset", "digits", "", 0, folder / "digits.safetensors")
    digits = load_file(folder / "digits.safetensors")
    write_idx(folder / "train-images-idx3-ubyte", digits["data"])
    write_idx(folder / "train-labels-idx1-ubyte", digits["targets"].astype("uint8"))


class Text:
    """13 different characters, some of them not of one byte."""

    def __init__(self, folder):
        self.folder = folder / "text.txt"
        generator = random.Random(3)
        words = ["pea ", "lap ", "\u00e9lan ", "sleep\n", "\u20acale ", "orb "]
        self.folder.write_text("".join(generator.choice(words) for _ in range(2500)), encoding="utf-8", newline="")
        assert len(set(self.folder.read_text(encoding="utf-8"))) == 13
        self.flags = ["--dataset", f"text:{self.folder}"]


class Data:
    """Real MNIST where there is some, else the built-in digits: what both train on."""

    def __init__(self, folder):
        self.folder, self.flags = folder, ["--dataset", "digits"]
        if t.data_dir():
            self.folder, self.flags = t.data_dir() / "mnist", ["--dataset", "mnist", "--data-dir", t.data_dir()]
        else:
            write_digits(folder)


def python_outputs(command, world_size):
    ranks = [
        subprocess.Popen([str(c) for c in command(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         env=t.clean_environment()) for rank in range(world_size)
    ]
    try:
        return [(process.communicate(timeout=200)[0], process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def python_weights(folder, data, world_size, options):
    from safetensors.torch import load_file

    out = folder / "python.safetensors"
    rest = [world_size, folder / "meeting", out, data.folder, json.dumps(options)]
    outputs = python_outputs(lambda rank: [*torch_forks.python(), SCRIPT, rank, *rest], world_size)
    for rank, (output, code) in enumerate(outputs):
        if code != 0:
            raise AssertionError(f"Python's rank {rank} failed:\n{output}")
    return load_file(out)


def lockstep_weights(folder, data, world_size, options, start=()):
    from safetensors.torch import load_file

    out = folder / "lockstep.safetensors"
    if options.get("optimizer") == "lbfgs":
        kind = ["--optimizer", "lbfgs", "--max-iter", options["max_iter"], "--history-size", options["history_size"]]
        if options["line_search_fn"]:
            kind += ["--line-search-fn", options["line_search_fn"]]
    else:
        kind = ["--weight-decay", options.get("weight_decay", 0)]
        kind += ["--optimizer", options["optimizer"]] if "optimizer" in options else ["--momentum", options["momentum"]]
    flags = [
        "--model", options["model"], *data.flags, "--devices", world_size,
        "--batch-size", options["batch_size"], "--lr", options["lr"], *kind, "--seed", options["seed"],
        "--max-epochs", options["epochs"], "--limit-train-batches", options["batches"], "--limit-val-batches", 1,
        "--save-weights", out, *start, "--threads", 1, "--memory-format", options.get("memory_format", "contiguous")
    ]
    if options.get("backend") == "nccl":
        flags += ["--accelerator", "cuda"]
    if options.get("deterministic"):
        flags.append("--deterministic")
    if options.get("nesterov"):
        flags.append("--nesterov")
    if options.get("clip"):
        flags += ["--gradient-clip-val", options["clip"]]
    t.run(t.LOCKSTEP, "train", *flags, timeout=200)
    return load_file(out)


@unittest.skipUnless(t.torch_is_the_linked_one(), "Python's torch is not the LibTorch that is linked")
class SameWeights(unittest.TestCase):

    def check(self, world_size, tolerance=0, data=Data, **options):
        options = {"lr": 0.05, "momentum": 0.9, "seed": 42, "batch_size": 32, **options}
        with t.temporary_folder() as folder:
            data = data(folder)
            theirs = python_weights(folder, data, world_size, options)
            ours = lockstep_weights(folder, data, world_size, options)
        self.assertEqual(set(ours), set(theirs))
        for name, tensor in theirs.items():
            self.assertEqual(ours[name].dtype, tensor.dtype, name)
            difference = (ours[name].double() - tensor.double()).abs().max().item()
            self.assertLessEqual(difference, tolerance, name)

    def test_mlp_on_one_rank(self):
        self.check(1, model="mlp", epochs=2, batches=40)

    def test_mlp_on_two_ranks(self):
        self.check(2, model="mlp", epochs=2, batches=40)

    def test_mlp_with_nesterov_decay_and_clipping(self):
        self.check(2, model="mlp", epochs=1, batches=40, nesterov=True, weight_decay=0.001, clip=0.5, seed=7)

    def test_logical_shards_are_ranks(self):
        """Two shards, on one process or two, are DDP on two ranks."""
        options = {"lr": 0.05, "momentum": 0.9, "seed": 42, "batch_size": 32, "model": "mlp", "epochs": 1, "batches": 40,
                   "clip": 0.5}
        with t.temporary_folder() as folder:
            data = Data(folder)
            theirs = python_weights(folder, data, 2, options)
            for ranks in (1, 2):
                ours = lockstep_weights(folder, data, ranks, options, ["--logical-shards", 2])
                for name, tensor in theirs.items():
                    self.assertTrue(ours[name].equal(tensor), (ranks, name))

    def test_goes_on_from_an_optimizer_that_python_saved(self):
        """Python trains 7 steps, saves, and goes on. Lockstep goes on from the file, to the same bits."""
        for world_size, options in ((1, {}), (2, {"nesterov": True, "weight_decay": 0.001}),
                                    (1, {"optimizer": "adam"}), (2, {"optimizer": "adamw", "weight_decay": 0.01})):
            options = {"lr": 0.001 if "optimizer" in options else 0.05, "momentum": 0.9, "seed": 42, "batch_size": 32,
                       "model": "mlp", "epochs": 1, "batches": 9, "before": 7, **options}
            with t.temporary_folder() as folder:
                data = Data(folder)
                theirs = python_weights(folder, data, world_size, options)
                for start in (folder / "start.pt", folder / "start"):
                    with self.subTest(options=options, start=start.name):
                        ours = lockstep_weights(folder, data, world_size, options,
                                                ["--load-weights", start, "--load-optimizer", start])
                        self.assertEqual(set(ours), set(theirs))
                        for name, tensor in theirs.items():
                            self.assertTrue(ours[name].equal(tensor), name)
                without = lockstep_weights(folder, data, world_size, options, ["--load-weights", folder / "start.pt"])
                self.assertFalse(all(without[name].equal(tensor) for name, tensor in theirs.items()))

    def test_convnet_on_one_rank(self):
        self.check(1, model="convnet", epochs=2, batches=6, lr=0.01)

    def test_convnet_on_two_ranks(self):
        self.check(2, model="convnet", epochs=2, batches=6, lr=0.01)

    def test_convnet_in_the_default_order_of_memory(self):
        """Channels-last, where oneDNN, the statistics of batch norm and our norm_relu_pool add in another order:
        each of 4 steps differs by some units in the last place of what it sums, 1e-7 of values up to 1."""
        for world_size in (1, 2):
            with self.subTest(world_size=world_size):
                self.check(world_size, tolerance=5e-6, model="convnet", epochs=1, batches=4, lr=0.01,
                           memory_format="auto")

    def test_on_a_gpu(self):
        """The algorithms of convolutions that cuDNN takes by default add in another order in each run."""
        import torch

        if not torch.cuda.is_available():
            self.skipTest("there is no CUDA device")
        for model in ("mlp", "convnet"):
            for optimizer in ({}, {"optimizer": "adam", "lr": 0.001}):
                with self.subTest(model=model, **optimizer):
                    self.check(1, model=model, epochs=1, batches=40, backend="nccl", deterministic=True, **optimizer)

    def test_lbfgs(self):
        """Its scalars are doubles in C++ and float32 tensors in Python. The script searches in doubles too. Without a
        search the length of the first step may differ by rounding, 1e-7 of updates below 1, and each of some 20
        iterations builds on the one before."""
        for world_size in (1, 2):
            for line_search, lr, tolerance in ((None, 0.1, 1e-5), ("strong_wolfe", 1, 0)):
                with self.subTest(world_size=world_size, line_search=line_search):
                    self.check(world_size, tolerance, Data, model="mlp", optimizer="lbfgs", epochs=1, batches=4,
                               batch_size=128, lr=lr, max_iter=5, history_size=4, line_search_fn=line_search)

    def test_gpt_on_a_text(self):
        import parity_models

        for world_size in (1, 2):
            with self.subTest(world_size=world_size):
                self.check(world_size, data=Text, model=parity_models.SMALL_GPT, context=16, epochs=2, batches=20,
                           batch_size=4)

    def test_a_torchscript_file(self):
        """Trained from where it stands: in Python and here the same file. LibTorch's executor fuses operations by what
        its first runs have shown it, so last bits may differ. No dropout: such a plan may draw its masks otherwise."""
        import torch

        def net(*norm):
            return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), *norm, torch.nn.ReLU(), torch.nn.Flatten(),
                                       torch.nn.Linear(4 * 26 * 26, 10))

        def scripted():
            return torch.jit.script(net(torch.nn.BatchNorm2d(4)))

        def traced():  # It keeps the mode that it was traced in: no norm, whose statistics an evaluation would change.
            return torch.jit.trace(net(), torch.zeros(2, 1, 28, 28))

        with t.temporary_folder() as folder:
            for write, world_size in ((scripted, 2), (traced, 1)):
                path = folder / f"{write.__name__}.pt"
                write().save(path)
                with self.subTest(kind=write.__name__, world_size=world_size):
                    self.check(world_size, tolerance=5e-6, model=str(path), epochs=1, batches=8, lr=0.01)


if __name__ == "__main__":
    t.main()
