"""`lockstep train` on a GPU; one is enough."""

import json
import re
import unittest

import lockstep_testing as t

DEVICES = [device for device in json.loads(t.run(t.LOCKSTEP, "env", "--json").stdout)["devices"]
           if device["device"].startswith("cuda") and device["usable"]]
SHORT = ("--dataset", "digits", "--limit-train-batches", 12, "--max-epochs", 2, "--quiet")


def train(*flags, accelerator="cuda", **how):
    return t.run(t.LOCKSTEP, "train", *SHORT, "--accelerator", accelerator, *flags, **how)


def loss(*flags, **how):
    return float(re.search(r"loss (\d+\.\d+)$", train(*flags, **how).stdout.strip())[1])


@unittest.skipUnless(DEVICES, "there is no CUDA device")
class Cuda(unittest.TestCase):

    def test_trains_as_on_the_cpu(self):
        for model in ("mlp", "convnet"):
            for optimizer in ("sgd", "adam"):
                flags = ("--model", model, "--optimizer", optimizer)
                with self.subTest(flags=flags):
                    self.assertAlmostEqual(loss(*flags), loss(*flags, accelerator="cpu"), delta=0.01)

    def test_every_strategy_ends_alike(self):
        expected = loss("--model", "mlp", "--optimizer", "adam")
        for strategy in ("dp", "zero1", "zero2", "fsdp", "pipeline"):
            with self.subTest(strategy=strategy):
                self.assertAlmostEqual(loss("--model", "mlp", "--optimizer", "adam", "--strategy", strategy), expected,
                                       delta=0.001)

    def test_every_precision(self):
        expected = loss("--model", "convnet")
        for precision in ("bf16-mixed", "16-mixed", "bf16-true", "16-true"):
            with self.subTest(precision=precision):
                self.assertAlmostEqual(loss("--model", "convnet", "--precision", precision), expected, delta=0.1)

    def test_a_checkpoint_goes_on_with_the_same_bits_and_on_the_cpu(self):
        flags = ("--model", "mlp", "--optimizer", "adam")
        for strategy in ("ddp", "fsdp"):
            with self.subTest(strategy=strategy), t.temporary_folder() as folder:
                train(*flags, "--strategy", strategy, "--checkpoint-dir", folder / "run", "--checkpoint-every", 5,
                      "--keep-checkpoints", 0, "--save-weights", folder / "whole")
                middle = ("--resume", folder / "run/step-00000005")
                train(*flags, "--strategy", strategy, *middle, "--save-weights", folder / "resumed")
                self.assertEqual((folder / "resumed").read_bytes(), (folder / "whole").read_bytes())
                self.assertAlmostEqual(loss(*flags, *middle, accelerator="cpu"), loss(*flags, *middle), delta=0.001)
        with t.temporary_folder() as folder:
            train(*flags, "--checkpoint-dir", folder / "run", "--checkpoint-every", 5, "--keep-checkpoints", 0,
                  accelerator="cpu")
            middle = ("--resume", folder / "run/step-00000005")
            self.assertAlmostEqual(loss(*flags, *middle, accelerator="cpu"), loss(*flags, *middle), delta=0.001)

    def test_a_rank_without_a_device_is_refused(self):
        count = len(DEVICES) + 1
        result = t.run(t.LOCKSTEP, "run", "--nproc-per-node", count, t.LOCKSTEP, "train", *SHORT, "--backend", "nccl",
                       check=False, timeout=60)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(f"rank {count - 1} has no CUDA device", result.stderr)
        result = train("--devices", count, check=False)
        self.assertEqual(result.returncode, 2, result.stderr)

    def test_more_ranks_than_devices_share_memory(self):
        result = t.run(t.LOCKSTEP, "train", *SHORT, "--devices", len(DEVICES) + 1)
        self.assertRegex(result.stdout.strip(), r"^test accuracy")

    def test_too_little_memory_is_said(self):
        result = train("--model", "wide", check=False,
                       env=t.clean_environment(PYTORCH_ALLOC_CONF="per_process_memory_fraction:0.00005"))
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("out of memory", result.stderr)
        self.assertIn("hint:", result.stderr)
        self.assertNotIn("frame #", result.stderr)


if __name__ == "__main__":
    t.main()
