"""Checkpoints: runs that are killed, stopped and damaged go on to the bits of one that was not."""

import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import unittest

import lockstep_testing as t
import torch_forks


LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")


def train(*flags, **kwargs):
    return t.run(t.LOCKSTEP, "train", *flags, **kwargs)


def steps_in(folder):
    return sorted(path.name for path in folder.glob("step-*"))


MODEL = "model-00001-of-00001.safetensors"
STATE = "state-00001-of-00001.safetensors"


def flip_a_byte(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


class SameBits(unittest.TestCase):
    """A run killed with -9 at a random step, then resumed, ends with the bits of an uninterrupted one."""

    def check(self, *flags, every=3, kills=1):
        seed = int(os.environ.get("LOCKSTEP_TEST_SEED", random.randrange(1 << 30)))
        print(f"LOCKSTEP_TEST_SEED={seed}", file=sys.stderr)
        rng = random.Random(seed)
        with t.temporary_folder() as folder:
            whole, saved, metrics = folder / "whole.safetensors", folder / "saved", folder / "metrics.jsonl"
            uninterrupted = train(*flags, "--save-weights", whole)
            command = [
                *flags, "--checkpoint-dir", saved, "--checkpoint-every", every, "--resume", "auto", "--log-every-n-steps",
                1, "--metrics-file", metrics, "--save-weights", folder / "resumed.safetensors"
            ]
            for _ in range(max(kills, 1 + LONG)):
                self.kill_somewhere(command, metrics, saved, rng)
            resumed = train(*command)
            self.assertIn("resumed after step", resumed.stdout)
            self.assertEqual((folder / "resumed.safetensors").read_bytes(), whole.read_bytes())
            self.assertEqual(resumed.stdout.splitlines()[-1], uninterrupted.stdout.splitlines()[-1])
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            steps = [row["step"] for row in rows if row["split"] == "train"]
            self.assertEqual(steps, list(range(1, len(steps) + 1)), "each step has one row, in order")

    def kill_somewhere(self, command, metrics, saved, rng):
        """Kills the whole job a random number of steps, at least 4, after it has started to train, and has saved."""
        before = metrics.stat().st_size if metrics.exists() else 0
        rows = rng.randrange(4, 12)
        process = subprocess.Popen([str(c) for c in (t.LOCKSTEP, "train", *command)], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=t.clean_environment(), start_new_session=True)
        try:

            def far_enough():
                if process.poll() is not None:
                    return True
                return metrics.exists() and metrics.stat().st_size > before + rows * 120 and any(saved.glob("step-*"))

            t.wait_until(far_enough, 90, "training")
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def test_mlp_on_one_rank(self):
        self.check("--limit-train-batches", 20, "--max-epochs", 3, kills=2)

    def test_accumulation_on_three_ranks(self):
        # Three: the order in which Gloo sums depends on where an element lies in its bucket.
        self.check("--devices", 3, "--limit-train-batches", 21, "--accumulate-grad-batches", 2, "--max-epochs", 4)

    def test_dropout_and_batch_norm_on_two_ranks_with_adam_and_a_schedule(self):
        self.check("--devices", 2, "--model", "fashion-cnn", "--optimizer", "adam", "--schedule", "cosine", "--warmup-steps", 5,
                   "--lr", 0.002, "--batch-size", 8, "--limit-train-batches", 12, "--limit-val-batches", 1, "--max-epochs", 3)


class Stopped(unittest.TestCase):

    def test_after_a_signal_resume_goes_on_from_that_step(self):
        with t.temporary_folder() as folder:
            metrics, saved = folder / "m.jsonl", folder / "saved"
            flags = ["--devices", 2, "--max-epochs", 400, "--log-every-n-steps", 5, "--metrics-file", metrics,
                     "--checkpoint-dir", saved, "--resume", "auto"]
            process = subprocess.Popen([str(c) for c in (t.LOCKSTEP, "train", *flags)], stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, env=t.clean_environment())
            t.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 1000, 60, "training")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 143, out + err)
            step = json.loads((saved / "latest" / "state.json").read_text())["step"]
            self.assertIn(f"stopped by SIGTERM after step {step}", out)
            again = train("--devices", 2, "--max-epochs", 1, "--checkpoint-dir", saved, "--resume", "auto")
            self.assertIn(f"resumed after step {step} ", again.stdout)

    def test_a_finished_run_only_says_its_outcome_again(self):
        with t.temporary_folder() as folder:
            flags = ["--devices", 2, "--max-epochs", 2, "--checkpoint-dir", folder, "--resume", "auto"]
            first = train(*flags)
            again = train(*flags)
            self.assertEqual(again.stdout.splitlines()[-1], first.stdout.splitlines()[-1])
            self.assertNotIn("epoch 1/2", again.stdout)
            self.assertIn("nothing to train: all of --max-epochs", again.stdout)
            self.assertNotIn("nothing to train", first.stdout)


class Folder(unittest.TestCase):

    def setUp(self):
        context = t.temporary_folder()
        self.folder = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        self.saved = self.folder / "saved"

    @classmethod
    def setUpClass(cls):
        """What most tests begin with."""
        cls.two_epochs = cls.enterClassContext(t.temporary_folder()) / "saved"
        train("--limit-train-batches", 5, "--max-epochs", 2, "--checkpoint-dir", cls.two_epochs)

    def save(self, *flags, epochs=2):
        if epochs == 2 and not flags:
            shutil.copytree(self.two_epochs, self.saved, symlinks=True)
            return
        train("--limit-train-batches", 5, "--max-epochs", epochs, "--checkpoint-dir", self.saved, *flags)

    def resume(self, *flags, check=True, resume="auto"):
        return train("--limit-train-batches", 5, "--max-epochs", 3, "--checkpoint-dir", self.saved, "--resume", resume,
                     *flags, check=check)

    def test_weights_and_optimizer_begin_another_run(self):
        """The next epoch is that of a resumed run: the same weights and optimizer, of other ranks."""
        self.save("--devices", 2, "--strategy", "zero1", "--optimizer", "adam", "--batch-size", 32, epochs=1)
        for name in (self.saved, self.saved / "latest"):
            other = self.folder / "other"
            train("--limit-train-batches", 5, "--max-epochs", 1, "--optimizer", "adam", "--load-weights", name,
                  "--load-optimizer", name, "--checkpoint-dir", other)
            content = (other / "latest" / STATE).read_bytes()
            begin = 8 + int.from_bytes(content[:8], "little")
            steps = [tensor for name, tensor in json.loads(content[8:begin]).items() if name.startswith("optimizer.step.")]
            self.assertTrue(steps)
            for tensor in steps:
                first = begin + tensor["data_offsets"][0]
                self.assertEqual(int.from_bytes(content[first:first + 8], "little"), 10, "5 of each run")
            shutil.rmtree(other)

    def test_layout(self):
        self.save("--checkpoint-every", 2, "--keep-checkpoints", 0)
        self.assertEqual(steps_in(self.saved), [f"step-{n:08}" for n in (2, 4, 5, 6, 8, 10)])
        self.assertEqual(sorted(os.listdir(self.saved)), sorted(steps_in(self.saved) + ["latest", "config.toml"]))
        self.assertEqual(os.readlink(self.saved / "latest"), "step-00000010")
        self.assertEqual(sorted(os.listdir(self.saved / "latest")), [MODEL, "model.safetensors.index.json", STATE, "state.json"])
        state = json.loads((self.saved / "latest" / "state.json").read_text())
        self.assertEqual((state["step"], state["epoch"], state["batches"]), (10, 2, 0))

    def test_sha256_where_it_is_wanted(self):
        self.save("--checkpoint-hash", "sha256")
        files = json.loads((self.saved / "latest" / "state.json").read_text())["files"]
        self.assertEqual(files[MODEL]["sha256"], hashlib.sha256((self.saved / "latest" / MODEL).read_bytes()).hexdigest())
        self.assertIn("resumed after step 10 ", self.resume().stdout)

    def test_three_are_kept(self):
        self.save(epochs=5)
        self.assertEqual(steps_in(self.saved), [f"step-{n:08}" for n in (15, 20, 25)])

    def test_pythons_safetensors_reads_them(self):
        try:
            from safetensors.numpy import load_file
        except ImportError:
            self.skipTest("Python has no safetensors")
        self.save("--save-weights", self.folder / "w.safetensors", "--devices", 2)
        latest = self.saved / "latest"
        model = {name: load_file(latest / file)[name] for name, file in
                 json.loads((latest / "model.safetensors.index.json").read_text())["weight_map"].items()}
        weights = load_file(self.folder / "w.safetensors")
        self.assertEqual(set(model), {f"layers.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")})
        for name in weights:
            self.assertEqual(model[name].tobytes(), weights[name].tobytes(), name)
        state = {name: tensor for path in latest.glob("state-*") for name, tensor in load_file(path).items()}
        self.assertIn("rank0.rng.cpu", state)
        self.assertIn("rank1.rng.cpu", state)
        self.assertTrue(any(name.startswith("optimizer.") for name in state), list(state))

    def test_a_damaged_one_is_named_and_the_one_before_is_used(self):
        self.save()
        newest = self.saved / "step-00000010"
        flip_a_byte(newest / MODEL)
        result = self.resume("--devices", 1)
        self.assertIn(f"{newest} is damaged: {MODEL} has the xxh3 ", result.stderr)
        self.assertIn("resumed after step 5 ", result.stdout)

    def test_a_damaged_one_asked_for_by_name_is_refused(self):
        self.save()
        newest = self.saved / "step-00000010"
        (newest / STATE).unlink()
        result = self.resume(check=False, resume=newest)
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"checkpoint {newest} is damaged: {STATE} is missing", result.stderr)

    def test_all_damaged_is_an_error_and_no_new_start(self):
        self.save()
        for folder in self.saved.glob("step-*"):
            flip_a_byte(folder / "state.json", 30)
        result = self.resume("--devices", 2, check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"every checkpoint in {self.saved} is damaged", result.stderr)

    def test_of_another_model_or_data_names_both(self):
        self.save()
        for flags, *messages in (
                (("--model", "wide", "--limit-train-batches", 4, "--batch-size", 32, "--optimizer", "adam"),
                 "--model 'mlp' in the checkpoint, 'wide' in this run", "--limit-train-batches '5' in the checkpoint, '4' in",
                 "--batch-size '64' in the checkpoint, '32' in this run", "--optimizer 'sgd' in the checkpoint, 'adam' in this run"),
                (("--global-batch-size", 32), "--global-batch-size 'none' in the checkpoint, '32' in")):
            result = self.resume(*flags, check=False)
            self.assertEqual(result.returncode, 1, result.stderr)
            for message in messages:
                self.assertIn(message, result.stderr)

    def test_an_equal_batch_may_be_said_by_the_other_flag(self):
        self.save("--devices", 2, "--batch-size", 32)
        self.assertIn("resumed after step 10 ", self.resume("--global-batch-size", 64, "--devices", 1).stdout)
        self.assertIn("resumed after step 15 ", self.resume("--batch-size", 64, "--devices", 1).stdout)
        result = self.resume("--global-batch-size", 32, check=False)
        self.assertIn("--global-batch-size '64' in the checkpoint, '32' in this run", result.stderr)

    def test_with_other_ranks_the_number_of_steps_is_that_of_both_runs(self):
        flags = ("--batch-size", 1000, "--checkpoint-dir", self.saved)
        train("--devices", 2, "--max-epochs", 1, *flags)
        result = train("--max-epochs", 2, "--log-every-n-steps", 1, "--resume", "auto", *flags)
        self.assertIn(", 15 steps in 2 epochs\n", result.stdout)
        self.assertIn("  step 15/15  ", result.stdout)

    def test_other_settings_are_told(self):
        """Another learning rate makes another course: no error, but no silence either."""
        self.save("--schedule", "step")
        same = self.resume("--schedule", "step", "--quiet")
        self.assertEqual(same.stderr, "")
        for flags, *messages in (
                (("--lr", 0.01, "--weight-decay", 0.1, "--gradient-clip-val", 1, "--devices", 2, "--lr-gamma", 0.5),
                 "--lr '0.05' in the checkpoint, '0.01' in this run", "--weight-decay '0.0' in the checkpoint, '0.1' in this run",
                 "--gradient-clip-val '0.0' in the checkpoint, '1.0' in", "number of ranks '1' in the checkpoint, '2' in this run",
                 "--lr-gamma '0.1' in the checkpoint, '0.5' in this run"),
                (("--schedule", "linear"), "--schedule 'step' in the checkpoint, 'linear' in this run")):
            result = self.resume("--schedule", "step", "--quiet", *flags, resume=self.saved / "step-00000010")
            told = [line for line in result.stderr.splitlines() if "goes on with other settings" in line]
            self.assertEqual(len(told), 1, result.stderr)
            for message in messages:
                self.assertIn(message, told[0])

    def test_of_another_version_names_both(self):
        self.save()
        for folder in self.saved.glob("step-*"):
            path = folder / "state.json"
            text = re.sub('"checksum":"[0-9a-f]*",', "", path.read_text()).replace('"version":4', '"version":99')
            checksum = hashlib.sha256(text.strip().encode()).hexdigest()
            path.write_text(text.replace("{", f'{{"checksum":"{checksum}",', 1))
        result = self.resume(check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn("has version 99 of the layout; this Lockstep reads versions 3 and 4", result.stderr)

    def test_a_new_run_does_not_mix_with_an_old_one(self):
        self.save()
        for devices in (2, 1)[:1 + LONG]:
            result = self.resume("--devices", devices, check=False, resume="none")
            self.assertEqual(result.returncode, 2)
            self.assertIn("holds checkpoints already (step-00000010)", result.stderr)
            self.assertIn("--resume auto", result.stderr)
        self.assertEqual(steps_in(self.saved), ["step-00000005", "step-00000010"])

    def test_going_on_from_an_earlier_one_sets_later_ones_aside(self):
        self.save()
        result = self.resume(resume=self.saved / "step-00000005")
        self.assertIn("superseded-step-00000010", result.stderr)
        self.assertEqual(steps_in(self.saved), [f"step-{n:08}" for n in (5, 10, 15)])
        self.assertTrue((self.saved / "superseded-step-00000010").is_dir())

    def test_a_part_of_the_weights_is_loaded_by_other_names(self):
        self.save("--save-weights", self.folder / "w.safetensors")
        flags = ("--load-weights", self.saved, "--load-only", "layers.0.*,layers.4.bias", "--lr", 0, "--max-epochs", 1,
                 "--limit-train-batches", 1, "--save-weights")
        train(*flags, self.folder / "part.safetensors")
        diff = json.loads(t.run(t.LOCKSTEP, "checkpoint", "diff", self.folder / "w.safetensors", self.folder / "part.safetensors",
                                "--json", check=False).stdout)
        self.assertEqual({row["name"] for row in diff["differences"]},
                         {"layers.2.weight", "layers.2.bias", "layers.4.weight"})
        refused = train(*flags, self.folder / "x.safetensors", "--load-rename", "layers.0.*=body.*", check=False)
        self.assertEqual(refused.returncode, 1, refused.stderr)
        for name in ("layers.0.weight", "layers.0.bias"):
            self.assertIn(name, refused.stderr)

    def test_metrics_say_how_long_saves_held_up_training(self):
        metrics = self.folder / "m.jsonl"
        self.save("--checkpoint-every", 2, "--metrics-file", metrics, "--log-every-n-steps", 1, epochs=1)
        waited = {row["step"]: row.get("save_seconds") for row in map(json.loads, metrics.read_text().splitlines())
                  if row["split"] == "train"}
        self.assertEqual([step for step, seconds in waited.items() if seconds], [3, 5], waited)

    def test_nothing_to_resume(self):
        self.assertIn("test accuracy", self.resume().stdout, "auto starts anew in an empty folder")
        result = self.resume(check=False, resume=self.folder / "none")
        self.assertEqual(result.returncode, 2)
        self.assertIn(f"--resume {self.folder / 'none'}: there is no such folder", result.stderr)

    def test_a_folder_of_checkpoints_can_be_given(self):
        self.save()
        moved = self.folder / "moved"
        shutil.move(self.saved, moved)
        self.assertIn("resumed after step 10 ", self.resume(resume=moved).stdout)
        self.assertIn("resumed after step 10 ", self.resume(resume=moved / "latest").stdout)


class AtAnySize(unittest.TestCase):
    """A checkpoint of any strategy and number of ranks is that of any other."""

    FLAGS = ("--optimizer", "adam", "--limit-val-batches", 2)

    def test_another_number_of_ranks_makes_the_same_steps(self):
        """Over 2, 3 and 1 ranks: each step has the samples, and so the loss, of a run that stayed at 2."""
        flags = (*self.FLAGS, "--global-batch-size", 24, "--limit-train-batches", 14, "--max-epochs", 2, "--schedule",
                 "cosine", "--log-every-n-steps", 1, "--checkpoint-every", 4, "--keep-checkpoints", 0)
        with t.temporary_folder() as folder:

            def run(name, devices, *more):
                train(*flags, "--devices", devices, "--checkpoint-dir", folder / name, "--metrics-file",
                      folder / f"{name}.jsonl", *more)
                rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
                return {row["step"]: row for row in rows if row["split"] == "train"}

            whole = run("whole", 2)
            self.assertEqual(sorted(whole), list(range(1, 29)))
            second = run("second", 3, "--resume", folder / "whole/step-00000004")
            third = run("third", 1, "--resume", folder / "second/step-00000020")
            self.assertEqual((min(second), min(third)), (5, 21))
            for rows in (second, third):
                for step, row in rows.items():
                    self.assertAlmostEqual(row["loss"], whole[step]["loss"], places=3, msg=f"step {step}")
                    self.assertEqual(row["lr"], whole[step]["lr"])

    def test_a_batch_of_each_rank_goes_on_where_a_step_begins(self):
        flags = (*self.FLAGS, "--limit-train-batches", 6, "--max-epochs", 1, "--batch-size", 8)
        with t.temporary_folder() as folder:
            train(*flags, "--devices", 2, "--checkpoint-dir", folder, "--checkpoint-every", 1, "--keep-checkpoints", 0)
            on = train(*flags, "--devices", 1, "--resume", folder / "step-00000002")
            self.assertIn("resumed after step 2 (epoch 1, after 32 samples of it)", on.stdout)
            off = train(*flags, "--devices", 3, "--resume", folder / "step-00000002", check=False)
            self.assertEqual(off.returncode, 1, off.stderr)
            self.assertIn("after 32 samples, where no step of this run begins", off.stderr)
            self.assertIn("--global-batch-size", off.stderr)

    def test_a_batch_that_cannot_be_shared_is_refused(self):
        result = train("--devices", 2, "--global-batch-size", 9, check=False)
        self.assertEqual(result.returncode, 2)
        self.assertIn("--global-batch-size 9 cannot be cut into 2 equal batches", result.stderr)

    def test_each_strategy_reads_what_others_wrote(self):
        """The same weights to the bit, and the same optimizer: it makes the same next epoch."""
        flags = (*self.FLAGS, "--global-batch-size", 24, "--limit-train-batches", 3)
        runs = (("zero2", 2), ("fsdp", 3), ("pipeline", 2), *LONG * [("ddp", 3), ("fsdp", 3), ("fsdp", 2)])
        with t.temporary_folder() as folder:

            def weights(name):
                return (folder / name).read_bytes()

            train(*flags, "--max-epochs", 1, "--checkpoint-dir", folder / "run", "--save-weights", folder / "first")
            before = weights("first")
            previous = folder / "run"
            for number, (strategy, devices) in enumerate(runs):
                with self.subTest(f"{previous.name} then {strategy} on {devices}"):
                    again = ("--strategy", strategy, "--devices", devices, "--resume", previous)
                    train(*flags, *again, "--max-epochs", 1, "--save-weights", folder / "same")
                    self.assertEqual(weights("same"), before)
                    previous = folder / f"{strategy}-{devices}-{number}"
                    train(*flags, *again, "--max-epochs", number + 2, "--checkpoint-dir", previous, "--save-weights",
                          folder / "next")
                    before = weights("next")
                    self.assertNotEqual(before, weights("same"))


class ReadByPython(unittest.TestCase):
    """torch.distributed.checkpoint reads the weights, of any strategy, and gives each rank its part."""

    SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from safetensors.torch import load_file
folder, weights, rank, size, meeting = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(size))
mesh = init_device_mesh("cpu", (int(size),))
expected = load_file(weights)
state = {name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) for name, value in expected.items()}
load(state, storage_reader=HuggingFaceStorageReader(folder))
for name, value in expected.items():
    assert torch.equal(state[name].full_tensor(), value), name
dist.barrier()
# Gloo's threads may still hold tensors of Python. They abort a process whose interpreter ends (pytorch#190489).
os._exit(0)
"""

    def check(self, strategy, devices):
        with t.temporary_folder() as folder:
            train("--limit-train-batches", 3, "--max-epochs", 1, "--strategy", strategy, "--devices", devices,
                  "--checkpoint-dir", folder / "run", "--save-weights", folder / "w.safetensors")
            script = folder / "read.py"
            script.write_text(self.SCRIPT)
            python = torch_forks.python("torch.distributed.checkpoint", "torch.distributed.tensor")
            ranks = [subprocess.Popen([*python, script, folder / "run/latest", folder / "w.safetensors", str(rank),
                                       "2", folder / "meeting"], stderr=subprocess.PIPE, text=True)
                     for rank in range(2)]
            for rank in ranks:
                self.addCleanup(rank.kill)
            for rank in ranks:
                _, err = rank.communicate(timeout=120)
                self.assertEqual(rank.returncode, 0, err)

    def setUp(self):
        for module in ("safetensors", "torch"):
            if not importlib.util.find_spec(module):
                self.skipTest(f"no module named {module}")

    def test_of_ddp(self):
        self.check("ddp", 2)

    def test_of_shards(self):
        self.check("fsdp", 3)


class InUse(unittest.TestCase):
    """One run at a time has a folder of checkpoints. A second one is refused and touches nothing."""

    def setUp(self):
        context = t.temporary_folder()
        self.folder = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        self.saved = self.folder / "saved"

    def start(self, *flags):
        """A run that saves after every step, until it is stopped."""
        command = [t.LOCKSTEP, "train", "--max-epochs", 4000, "--checkpoint-every", 1, "--keep-checkpoints", 2,
                   "--limit-val-batches", 1, "--checkpoint-dir", self.saved, "--resume", "auto", *flags]
        process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=t.clean_environment(), start_new_session=True)
        self.addCleanup(self.end, process)
        return process

    def end(self, process):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def wait_for_step(self, process, step=1):
        def reached():
            self.assertIsNone(process.poll(), "the run has ended")
            return any(name >= f"step-{step:08}" for name in steps_in(self.saved)) if self.saved.exists() else False

        t.wait_until(reached, 60, "a checkpoint")

    def owner(self):
        return json.loads((self.saved / ".in-use").read_text())

    def test_by_a_running_one(self):
        for devices in (2, 1)[:1 + LONG]:
            running = self.start("--devices", devices)
            self.wait_for_step(running)
            owner = self.owner()
            self.assertEqual(owner["program"], "lockstep")
            for flags in ((), ("--resume", "auto", "--devices", 2), ("--resume", "auto"))[:2 + LONG]:
                result = train("--checkpoint-dir", self.saved, *flags, check=False, timeout=60)
                self.assertEqual(result.returncode, 1, result.stdout)
                self.assertIn(f"folder {self.saved} is in use: process {owner['process']} (lockstep) of this host writes "
                              f"checkpoints there since {owner['since']}", result.stderr)
                self.assertEqual(result.stdout, "")
            newest = max(int(name[5:]) for name in steps_in(self.saved))
            self.wait_for_step(running, newest + 5)  # it goes on
            running.send_signal(signal.SIGTERM)
            out, err = running.communicate(timeout=60)
            self.assertEqual(running.returncode, 143, out + err)
            self.assertNotIn("cannot write", err)
            self.assertFalse((self.saved / ".in-use").exists())
            shutil.rmtree(self.saved)

    def test_two_at_once_on_an_empty_folder(self):
        both = [self.start(), self.start()]
        t.wait_until(lambda: any(process.poll() is not None for process in both), 90, "the end of one")
        loser, winner = sorted(both, key=lambda process: process.poll() is None)
        out, err = loser.communicate(timeout=60)
        self.assertEqual(loser.returncode, 1, out + err)
        self.assertIn(f"is in use: process {winner.pid} (lockstep) of this host", err)
        self.wait_for_step(winner)
        winner.send_signal(signal.SIGTERM)
        out, err = winner.communicate(timeout=60)
        self.assertEqual(winner.returncode, 143, out + err)

    def test_a_killed_one_is_no_obstacle(self):
        running = self.start()
        self.wait_for_step(running)
        self.end(running)
        self.assertTrue((self.saved / ".in-use").exists())
        again = train("--max-epochs", 1, "--limit-val-batches", 1, "--checkpoint-dir", self.saved, "--resume", "auto")
        self.assertIn("resumed after step", again.stdout)
        self.assertFalse((self.saved / ".in-use").exists())


class Snapshots(unittest.TestCase):
    """Checkpoints in memory outlive the job's processes."""

    def setUp(self):
        if not os.access("/dev/shm", os.W_OK):
            self.skipTest("this system has no /dev/shm")
        self.folder = self.enterContext(t.temporary_folder())
        self.saved = self.folder / "saved"
        self.addCleanup(lambda: [shutil.rmtree(path, ignore_errors=True) for path in self.left()])

    def left(self):
        """Snapshots of this test's folder, beside those of others' jobs."""
        def owner(path):
            with contextlib.suppress(OSError):  # Others remove theirs meanwhile.
                return (path / "checkpoint-dir").read_text()
            return ""

        every = pathlib.Path("/dev/shm").glob("lockstep-snapshots-*")
        return [path for path in every if owner(path).startswith(str(self.folder))]

    def flags(self, *more):
        """One epoch of 2,500 steps, at whose end alone the disk is written to."""
        return ["--devices", 2, "--batch-size", 2, "--limit-val-batches", 1, "--max-epochs", 1, "--snapshot-every", 5,
                "--checkpoint-dir", self.saved, *more]

    def killed(self, *more, whom):
        """Ends what `whom` gives of the job as soon as there is a snapshot."""
        job = subprocess.Popen([str(word) for word in (t.LOCKSTEP, "train", *self.flags(*more))], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=t.clean_environment())
        try:
            t.wait_until(lambda: any(list(path.glob("step-*")) for path in self.left()), 60, "a snapshot")
            os.kill(whom(job.pid), signal.SIGKILL)
            out, err = job.communicate(timeout=90)
            return job.returncode, out, err
        finally:
            job.kill()
            job.wait()

    def resumed(self):
        """What a run that goes on says of that. It is stopped then."""
        job = subprocess.Popen([str(word) for word in (t.LOCKSTEP, "train", *self.flags("--resume", "auto"))], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=t.clean_environment())
        self.addCleanup(job.kill)
        said = next((line for line in job.stdout if "resumed" in line), "")
        job.terminate()
        _, err = job.communicate(timeout=60)
        self.assertEqual(job.returncode, 143, err)
        return said

    def rank_of(self, pid):
        """A rank, below the supervisor."""
        for _ in range(2):
            pid = int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return pid

    def test_a_restart_goes_on_from_memory_to_the_same_bits(self):
        sharded = ("--strategy", "zero1", "--batch-size", 4, "--limit-train-batches", 600)  # Ranks of ddp need no snapshot.
        code, out, err = self.killed("--max-restarts", 1, "--save-weights", self.folder / "w", *sharded, whom=self.rank_of)
        self.assertEqual(code, 0, err)
        self.assertIn("resumed from a snapshot after step", out)
        self.assertEqual(self.left(), [])
        train(*self.flags("--checkpoint-dir", self.folder / "other", "--save-weights", self.folder / "whole", *sharded))
        self.assertEqual((self.folder / "w").read_bytes(), (self.folder / "whole").read_bytes())

    def test_a_job_that_fails_writes_it_to_the_disk(self):
        code, _, err = self.killed(whom=self.rank_of)
        self.assertNotEqual(code, 0)
        step, = steps_in(self.saved)
        self.assertIn(f"the last snapshot is saved as {self.saved / step}", err)
        self.assertEqual(self.left(), [])
        self.assertIn(f"resumed after step {int(step[5:]):,} ".replace(",", ""), self.resumed())

    def test_the_next_start_finds_what_a_killed_launcher_left(self):
        self.killed(whom=lambda pid: pid)
        self.assertEqual((steps_in(self.saved), len(self.left())), ([], 1))
        self.assertIn("resumed from a snapshot after step", self.resumed())
        self.assertEqual(self.left(), [])

    def test_one_of_a_folder_that_is_gone_is_not_taken(self):
        self.killed(whom=lambda pid: pid)
        shutil.rmtree(self.saved)
        self.assertEqual(len(self.left()), 1)
        self.assertNotIn("resumed", train(*self.flags("--resume", "auto", "--limit-train-batches", 10)).stdout)
        self.assertEqual(self.left(), [])


class Metrics(unittest.TestCase):

    def test_a_new_run_says_what_it_overwrites(self):
        with t.temporary_folder() as folder:
            metrics = folder / "metrics.jsonl"
            flags = ["--limit-train-batches", 2, "--max-epochs", 1, "--quiet", "--metrics-file", metrics]
            self.assertEqual(train(*flags).stderr, "")
            self.assertIn(f"metrics file {metrics} holds 2 rows of an earlier run; this new run overwrites them",
                          train(*flags).stderr)


class CannotSave(unittest.TestCase):
    """Full disks and read-only folders: named, no hang, nothing lost. test_bad_input.py has places that cannot be there."""

    def test_a_full_disk_is_told_and_leaves_the_last_good_one(self):
        """A save behind training that fails does not end it. The run fails at its end, as its result is not saved."""
        self.check_full_disk("wait", ["step-00000025"])

    def test_a_full_disk_ends_a_run_that_waits_for_its_saves(self):
        self.check_full_disk("none", [])

    def test_a_read_only_folder_is_named_before_training(self):
        with t.temporary_folder() as folder:
            result = self.run_mounted("ro", folder, f"{t.LOCKSTEP} train --devices 2 --checkpoint-dir {folder}")
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertIn(f"cannot write checkpoints to {folder}", result.stderr)
            self.assertIn("Read-only file system", result.stderr)
            self.assertNotIn("epoch 1", result.stdout)

    def run_mounted(self, options, folder, script):
        """The script where a file system of these options is mounted on the folder."""
        can_mount = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0 \
            if shutil.which("unshare") else False
        script = f"mount -t tmpfs -o {options} tmpfs {folder} || exit 77; {script}"
        result = t.run("unshare", "-rm", "sh", "-c", script, check=False, timeout=60) if can_mount else None
        if not result or result.returncode == 77:
            self.skipTest("no small file system can be mounted here (unshare -rm)")
        return result

    def check_full_disk(self, overlap, told):
        with t.temporary_folder() as folder:
            saved = folder / "saved"
            saved.mkdir()
            # The MLP's checkpoint takes 0.9 MB: one fits, the second does not.
            result = self.run_mounted("size=1500k", saved, (
                f"{t.LOCKSTEP} train --devices 2 --limit-train-batches 5 --checkpoint-overlap {overlap} "
                f"--checkpoint-dir {saved}; code=$?; cp -r {saved} {folder}/after; exit $code"))
            self.assertEqual(result.returncode, 1, result.stderr)
            # News of a slow rank may stand before and after it.
            last_error = result.stderr[result.stderr.rindex(" error: "):]
            self.assertIn("No space left on device", last_error)
            for text in ["step-00000010", *told]:
                self.assertIn(text, result.stderr)
            after = folder / "after"
            self.assertEqual(steps_in(after), ["step-00000005"])
            self.assertEqual([name for name in os.listdir(after) if name.startswith(".tmp")], [])
            resumed = train("--devices", 2, "--limit-train-batches", 5, "--max-epochs", 2, "--checkpoint-dir", after,
                            "--resume", "auto")
            self.assertIn("resumed after step 5 ", resumed.stdout)


if __name__ == "__main__":
    t.main()
