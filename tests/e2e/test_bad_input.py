"""What bad input to `lockstep train` and `eval` gets: an error that names the thing and what to do; no hang."""

import gzip
import pathlib
import shutil
import subprocess
import unittest

import lockstep_testing as t

TIMEOUT = 60


class BadInput(unittest.TestCase):

    def refuse(self, command, code, *messages, env=None):
        """Checks the exit code, that each message is said, and that the error comes once."""
        result = t.run(t.LOCKSTEP, *command, check=False, timeout=TIMEOUT, env=env)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        for message in messages:
            self.assertIn(message, result.stderr)
        self.assertNotIn("test accuracy", result.stdout)
        return result

    def temporary(self):
        context = t.temporary_folder()
        folder = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return folder


class Words(BadInput):

    def test_mistyped_words_get_the_nearest_one(self):
        for flags, message in (
            (("--modle", "mlp"), "did you mean '--model'?"),
            (("--max_epoch", 3), "did you mean '--max-epochs'?"),
            (("--model", "convnt"), "did you mean 'convnet'?"),
            (("--dataset", "mnits"), "did you mean 'mnist'?"),
            (("--optimizer", "adm"), "did you mean 'adam'?"),
            (("--schedule", "cosin"), "did you mean 'cosine'?"),
            (("--accelerator", "cudda"), "did you mean 'cuda'?"),
            (("--backend", "glo"), "did you mean 'gloo'?"),
            (("--on-nan", "stp"), "did you mean 'stop'?"),
        ):
            self.refuse(("train", *flags), 2, message)

    def test_numbers_out_of_range_name_the_flag(self):
        for flags, message in (
            (("--devices", 0), "--devices"),
            (("--devices", "two"), "--devices: 'two' is not a whole number"),
            (("--batch-size", 0), "--batch-size"),
            (("--max-epochs", -1), "--max-epochs"),
            (("--lr", "fast"), "--lr: 'fast' is not a number"),
            (("--lr", -1), "--lr"),
            (("--lr", "nan"), "--lr"),
            (("--limit-train-batches", 0), "--limit-train-batches"),
            (("--timeout", 0), "--timeout"),
            (("--lr",), "--lr needs a value"),
        ):
            self.refuse(("train", *flags), 2, message)

    def test_other_strategies_will_come(self):
        self.refuse(("train", "--strategy", "fsdp"), 2, "--strategy fsdp is not there yet")
        self.refuse(("train", "--strategy", "ddpp"), 2, "did you mean 'ddp'?")

    def test_combinations(self):
        self.refuse(("train", "--resume", "auto"), 2, "--resume auto needs --checkpoint-dir")
        self.refuse(("eval",), 2, "--load-weights is missing")


class Configuration(BadInput):

    def write(self, text):
        path = self.temporary() / "run.toml"
        path.write_text(text)
        return path

    def test_unknown_keys_and_wrong_values(self):
        path = self.write("model = 'mlp'\nmax-epoch = 3\n")
        self.refuse(("train", "--config", path), 2, f"{path}, line 2: unknown key 'max-epoch'; did you mean 'max-epochs'?")
        self.refuse(("train", "--config", self.write("lr = 'x'")), 2, "line 1: lr must be a number")
        self.refuse(("train", "--config", self.write("model = 'mpl'")), 2, "did you mean 'mlp'?")
        self.refuse(("train", "--config", self.write("lr = = 2")), 1, "is no TOML", "line 1")
        self.refuse(("train", "--config", "/none.toml"), 1, "/none.toml does not exist")


class Devices(BadInput):

    def test_an_accelerator_that_is_not_there(self):
        if pathlib.Path("/dev/nvidia0").exists():
            self.skipTest("this machine has a CUDA device")
        for devices in (1, 2):
            self.refuse(("train", "--accelerator", "cuda", "--devices", devices), 2, "there is no CUDA device here",
                        "--accelerator cpu")

    def test_a_backend_that_cannot_work_on_the_accelerator(self):
        self.refuse(("train", "--accelerator", "cpu", "--backend", "nccl"), 2, "--backend nccl needs CUDA")


class Data(BadInput):

    def test_files_that_are_missing(self):
        folder = self.temporary()
        for devices in (1, 2):
            self.refuse(("train", "--dataset", "mnist", "--data-dir", folder, "--devices", devices), 1, str(folder),
                        "train-images-idx3-ubyte")

    @unittest.skipUnless(t.data_dir(), t.NO_DATA)
    def test_files_that_are_empty_truncated_or_foreign(self):
        good = t.data_dir() / "mnist"
        name = "train-labels-idx1-ubyte.gz"
        packed = (good / name).read_bytes()
        for content, what in ((b"", "empty"), (packed[:2000], "truncated"), (b"\x89PNG\r\n" + bytes(5000), "foreign"),
                              (gzip.compress(b"\x00\x00\x08\x01\x00\x00\xea\x60" + bytes(100)), "short")):
            with self.subTest(what):
                folder = self.temporary()
                for path in good.glob("*.gz"):
                    (folder / path.name).symlink_to(path.resolve())
                (folder / name).unlink()
                (folder / name).write_bytes(content)
                self.refuse(("train", "--dataset", "mnist", "--data-dir", folder, "--devices", 2), 1, name)

    def test_a_batch_larger_than_the_data(self):
        self.refuse(("train", "--batch-size", 5001, "--devices", 2), 2,
                    "--batch-size 5001 is larger than the 5000 samples that each of 2 ranks has",
                    "give at most --batch-size 5000")

    def test_a_model_and_data_that_do_not_fit(self):
        self.refuse(("train", "--model", "linear", "--dataset", "digits"), 2, "model linear and dataset digits",
                    "the model takes 20 numbers a sample, the dataset's samples have 784")
        self.refuse(("train", "--model", "mlp", "--dataset", "random", "--devices", 2), 2,
                    "the model takes 784 numbers a sample, the dataset's samples have 20")


class Weights(BadInput):

    def test_missing_foreign_and_of_another_model(self):
        folder = self.temporary()
        weights = folder / "mlp.safetensors"
        t.run(t.LOCKSTEP, "train", "--max-epochs", 0, "--save-weights", weights)
        self.refuse(("eval", "--load-weights", folder / "none"), 1, str(folder / "none"))
        text = folder / "text"
        text.write_text("these are no weights, though the file is long enough for a header")
        self.refuse(("eval", "--load-weights", text), 1, str(text))
        cut = folder / "cut.safetensors"
        cut.write_bytes(weights.read_bytes()[:-100])
        self.refuse(("eval", "--load-weights", cut, "--devices", 2), 1, str(cut))
        self.refuse(("eval", "--model", "wide", "--load-weights", weights), 1,
                    f"{weights} does not fit the model: layers.0.weight has shape [128, 784], the model's has [784, 784]")


class Numbers(BadInput):
    """A loss that is NaN or infinite: the step and the rank are named, and no rank hangs."""

    def data_with_a_nan(self, folder):
        import numpy

        rng = numpy.random.default_rng(5)
        data = rng.random((400, 784), dtype="float32")
        targets = rng.integers(0, 10, 400)
        # Of two ranks one has this sample in an epoch.
        data[123, 45] = float("nan")
        numpy.savez(folder / "bad.npz", data=data, targets=targets, test_data=data[:50], test_targets=targets[:50])
        return f"file:{folder / 'bad.npz'}"

    def test_stops_with_step_and_rank(self):
        result = self.refuse(("train", "--dataset", self.data_with_a_nan(self.temporary()), "--batch-size", 16,
                              "--devices", 2), 1, "the loss is", "nan on rank ", "(epoch 1)", "--on-nan skip")
        self.assertRegex(result.stderr, r"nan on rank [01] at step ([1-9]|1[0-3]) \(epoch 1\)")

    def test_goes_on_by_flag(self):
        dataset = self.data_with_a_nan(self.temporary())
        for devices in (1, 2):
            result = t.run(t.LOCKSTEP, "train", "--dataset", dataset, "--batch-size", 16, "--devices", devices,
                           "--max-epochs", 2, "--on-nan", "skip", timeout=TIMEOUT)
            self.assertEqual(result.stderr.count("the step is skipped on all ranks"), 2, result.stderr)

    def test_a_run_that_diverges(self):
        self.refuse(("train", "--lr", "1e30", "--devices", 2), 1, "the loss is", "at step ")


class Launchers(BadInput):

    def test_ranks_out_of_range_and_mixed_or_missing_variables(self):
        base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}
        for change, message in (({"RANK": "2"}, "RANK"), ({"RANK": "-1"}, "RANK"), ({"RANK": "one"}, "RANK"),
                                ({"MASTER_PORT": "70000"}, "MASTER_PORT")):
            self.refuse(("train",), 2, message, env=t.clean_environment(**{**base, **change}))

    def test_a_peer_that_never_comes(self):
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = t.clean_environment(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2",
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        self.refuse(("train", "--timeout", 2), 1, "127.0.0.1", str(port), env=env)


if __name__ == "__main__":
    t.main()
