"""`lockstep train` and `lockstep eval` from outside: what they print, write, and how they end."""

import gzip
import json
import math
import os
import pty
import random
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
import zlib

import lockstep_testing as t
from run_testing import name_of

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
OUTCOME = re.compile(r"test accuracy (\d\.\d{4}) loss (\d+\.\d{4})")


def train(*flags, **kwargs):
    return t.run(t.LOCKSTEP, "train", *flags, **kwargs)


def last_line(result):
    return result.stdout.rstrip("\n").split("\n")[-1]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def processes_below(root):
    """The numbers of all descendants of a process."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as stat:
                parents[int(entry)] = int(stat.read().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    below = [root]
    for parent in below:
        below += [pid for pid in parents if parents[pid] == parent]
    return below[1:]


def group_members(pgid):
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getpgid(int(entry)) == pgid and alive(entry):
                    members.append(int(entry))
            except ProcessLookupError:
                pass
    return members


def write_idx_sets(folder, pack):
    """The four files of MNIST with a few made-up images."""
    folder.mkdir()
    rng = random.Random(5)
    for name, count in (("train", 64), ("t10k", 16)):
        for kind, shape, byte in (("images-idx3", (count, 28, 28), lambda: rng.randrange(256)),
                                  ("labels-idx1", (count,), lambda: rng.randrange(10))):
            content = bytes((0, 0, 8, len(shape))) + b"".join(size.to_bytes(4, "big") for size in shape)
            content += bytes(byte() for _ in range(math.prod(shape)))
            path = folder / f"{name}-{kind}-ubyte{'.gz' if pack else ''}"
            path.write_bytes(gzip.compress(content) if pack else content)


class UnpackedAhead(unittest.TestCase):
    def run_on(self, folder, *flags):
        result = train("--model", "mlp", "--batch-size", 8, "--max-epochs", 2, "--devices", 2, *flags,
                       env=t.clean_environment(LOCKSTEP_LOG_LEVEL="debug", LOCKSTEP_DATA_DIR=folder))
        return last_line(result), result.stderr.count("taken as it was unpacked before")

    def test_packed_files_are_unpacked_once_for_all_ranks_and_train_alike(self):
        with t.temporary_folder() as folder:
            for pack in (False, True):
                write_idx_sets(folder / str(pack), pack)
            (folder / "run.toml").write_text("max-epochs = 2\n")
            plain, taken = self.run_on(folder / "False", "--dataset", "mnist")
            self.assertRegex(plain, OUTCOME)
            self.assertEqual(taken, 0)
            for flags in (("--dataset", "mnist"), ("--dataset=mnist",),
                          ("--dataset", "mnist", "--data_dir", folder / "True"),
                          ("--dataset", "fashion-mnist", "--data-dir", "/nowhere", "--dataset", "mnist",
                           f"--data-dir={folder / 'True'}")):
                elsewhere = folder / ("False" if "--data_dir" in flags else "True")
                self.assertEqual(self.run_on(elsewhere, *flags), (plain, 4), flags)  # a line of several ranks is shown once
            self.assertEqual(self.run_on(folder / "True", "--dataset", "mnist", "--config", folder / "run.toml"), (plain, 0))

    def run_measured(self, folder):
        """Its exit code, standard error, and peak of memory in bytes."""
        command = [t.LOCKSTEP, "train", "--dataset", "mnist", "--data-dir", folder, "--max-epochs", "0", "--threads", "1"]
        with open(folder / "stderr", "w+") as stderr:
            process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=stderr,
                                       env=t.clean_environment(LOCKSTEP_LOG_LEVEL="debug"))
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            stderr.seek(0)
            return process.returncode, stderr.read(), usage.ru_maxrss << 10

    def test_what_is_more_than_its_header_says_takes_no_memory(self):
        with t.temporary_folder() as folder:
            write_idx_sets(folder / "mnist", True)
            packer = zlib.compressobj(1, wbits=31)
            with open(folder / "mnist" / "train-images-idx3-ubyte.gz", "wb") as bomb:
                bomb.write(packer.compress(bytes((0, 0, 8, 3)) + b"".join(n.to_bytes(4, "big") for n in (64, 28, 28))))
                bomb.write(packer.flush(zlib.Z_FULL_FLUSH))
                bomb.write(150 * (packer.compress(bytes(4 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)))
            code, err, peak = self.run_measured(folder)
            self.assertEqual(code, 1)
            self.assertIn("byte 50192 of the decompressed content: more bytes follow", err)
            # The file unpacks to 600 MB; a sanitizer's shadow is 300 MB and more.
            self.assertLess(peak, (1 << 30) if t.SANITIZED else 450 << 20)


class Outcome(unittest.TestCase):

    def test_the_command_of_the_readme_reaches_97_percent(self):
        result = train("--model", "mlp", "--dataset", "digits", "--devices", 2)
        match = OUTCOME.fullmatch(last_line(result))
        self.assertTrue(match, result.stdout)
        self.assertGreaterEqual(float(match[1]), 0.97)
        self.assertRegex(result.stdout, r"(?m)^2 ranks over (shm|gloo) on cpu, batch size 64 per rank, 128 a step, 395 ")
        epochs = [float(a) for a in re.findall(r"^epoch \d/\d  train .*test loss \S+  accuracy (\S+)", result.stdout, re.M)]
        self.assertEqual(len(epochs), 5)
        self.assertLess(epochs[0], 0.97, "the digits must need some epochs")

    def test_ranks_other_than_0_print_nothing_and_nothing_is_on_standard_error(self):
        result = train("--devices", 2, "--limit-train-batches", 3, "--max-epochs", 1)
        self.assertEqual(result.stdout.count("test accuracy"), 1)
        self.assertEqual(result.stderr, "")

    def test_one_rank_shares_nothing(self):
        result = t.run(t.LOCKSTEP, "train", "--max-epochs", 0)
        self.assertRegex(result.stdout, r"(?m)^1 rank on cpu, batch size 64 per rank, 64 a step, ")

    def test_ranks_with_other_flags_are_told(self):
        result = t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, "sh", "-c",
                       f"exec {t.LOCKSTEP} train --max-epochs 1 --seed 1$RANK --data-dir folder$RANK "
                       '$([ "$RANK" = 0 ] || echo --optimizer adam)', check=False)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("--seed is 10 on rank 0 and 11 on rank 1", result.stderr)
        self.assertIn("--optimizer is 'sgd' on rank 0 and 'adam' on rank 1", result.stderr)
        self.assertNotIn("--data-dir", result.stderr)
        with t.temporary_folder() as folder:
            train("--max-epochs", 0, "--save-weights", folder / "w.safetensors")
            result = t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, "sh", "-c",
                           f"exec {t.LOCKSTEP} eval --load-weights {folder}/w.safetensors "
                           "--limit-val-batches 1$RANK", check=False)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("--limit-val-batches is 10 on rank 0 and 11 on rank 1", result.stderr)

    def test_devices_under_a_launcher_are_told_of_where_they_are_ignored(self):
        flags = ("train", "--max-epochs", 0, "--limit-val-batches", 1, "--devices")
        result = t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, t.LOCKSTEP, *flags, 3)
        self.assertEqual(result.stderr.count("--devices 3 is ignored"), 1, result.stderr)
        self.assertIn("rank 0 of 2", result.stderr)
        result = t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, t.LOCKSTEP, *flags, 2)
        self.assertNotIn("ignored", result.stderr)

    def test_variables_that_were_left_over_are_told(self):
        """They name as many ranks as --devices does, so nothing else says why it waits."""
        with subprocess.Popen([t.LOCKSTEP, "train", "--devices", "2"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                              text=True, env=t.clean_environment(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1",
                                                                 MASTER_PORT=1)) as process:
            try:
                line = process.stderr.readline()
            finally:
                process.kill()
        self.assertIn("rank 1 of 2, started by torchrun, and waits for the others", line)

    def test_an_address_of_another_host_that_was_left_over_hinders_nothing(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        train("--limit-train-batches", 2, "--max-epochs", 1, "--devices", 2, "--timeout", 20,
              env=t.clean_environment(MASTER_ADDR="192.0.2.1", MASTER_PORT=port))

    def test_ranks_are_forks_where_these_can_go_on(self):
        """They share what LibTorch has set up, which shows in the pages that are touched for the first time."""
        def pages(folder, **env):
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
            train("--max-epochs", 1, "--devices", 2, "--threads", 2, "--save-weights", folder / "w.safetensors",
                  env=t.clean_environment(**env))
            content = (folder / "w.safetensors").read_bytes()
            return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before, content

        with t.temporary_folder() as folder:
            forked, weights = pages(folder)
            # OpenMP ties the first thread to a processor when it is loaded, which a fork would inherit.
            executed, same_weights = pages(folder, OMP_PROC_BIND="true")
        self.assertEqual(weights, same_weights)
        self.assertLess(forked, 0.75 * executed)

    def test_quiet_prints_the_last_line_only(self):
        result = train("--quiet", "--limit-train-batches", 3, "--max-epochs", 2)
        self.assertRegex(result.stdout, r"\Atest accuracy \S+ loss \S+\n\Z")

    def test_regression_has_a_loss_and_no_accuracy(self):
        result = train("--model", "linear", "--dataset", "random", "--devices", 2, "--max-epochs", 2)
        self.assertRegex(last_line(result), r"^test loss 0\.\d{4}$")

    def test_a_part_of_the_test_data_is_marked(self):
        result = train("--max-epochs", 0, "--limit-val-batches", 1, "--quiet")
        self.assertIn("tested on 256 of 2,000 held-out samples only, by --limit-val-batches 1", result.stderr)
        self.assertTrue(OUTCOME.fullmatch(result.stdout.rstrip("\n")), result.stdout)
        self.assertEqual(train("--max-epochs", 0, "--limit-val-batches", 99).stderr, "")

    def test_no_epochs_is_an_evaluation_of_the_fresh_model(self):
        accuracy = float(OUTCOME.fullmatch(last_line(train("--max-epochs", 0)))[1])
        self.assertLess(accuracy, 0.3)

    def test_every_model_and_optimizer_trains(self):
        for model in ("convnet", "fashion-cnn", "wide"):
            train("--model", model, "--limit-train-batches", 2, "--max-epochs", 1, "--limit-val-batches", 1)
        for optimizer in ("adam", "adamw", "rmsprop", "adagrad"):
            result = train("--optimizer", optimizer, "--max-epochs", 1)
            self.assertGreater(float(OUTCOME.fullmatch(last_line(result))[1]), 0.5, optimizer)


class Evaluation(unittest.TestCase):

    def test_saved_weights_give_the_same_outcome_on_any_number_of_ranks(self):
        with t.temporary_folder() as folder:
            weights = folder / "w.safetensors"
            trained = train("--devices", 2, "--max-epochs", 1, "--save-weights", weights)
            # 2 and 3 ranks: the loss is the same up to the rounding of its sum, so to 4 digits.
            for devices in (1, 2, 3):
                result = t.run(t.LOCKSTEP, "eval", "--load-weights", weights, "--devices", devices)
                self.assertEqual(last_line(result), last_line(trained))

    def test_weights_can_be_started_from(self):
        with t.temporary_folder() as folder:
            weights = folder / "w.safetensors"
            trained = train("--max-epochs", 1, "--save-weights", weights)
            loaded = train("--max-epochs", 0, "--load-weights", weights, "--seed", 5)
            self.assertEqual(last_line(loaded), last_line(trained))


class Options(unittest.TestCase):

    def weights(self, folder, name, *flags):
        from safetensors.numpy import load_file

        train("--save-weights", folder / name, "--limit-val-batches", 1, *flags)
        return load_file(folder / name)

    def assert_same(self, a, b, within=0.0):
        self.assertEqual(set(a), set(b))
        for name in a:
            difference = abs(a[name].astype("float64") - b[name].astype("float64")).max()
            self.assertLessEqual(difference, within, name)

    def difference(self, a, b):
        return max(abs(a[name].astype("float64") - b[name].astype("float64")).max() for name in a)

    def test_the_seed_decides_the_weights(self):
        with t.temporary_folder() as folder:
            flags = ("--max-epochs", 1, "--limit-train-batches", 5)
            one = self.weights(folder, "a", *flags, "--seed", 1)
            again = self.weights(folder, "b", *flags, "--seed", 1)
            other = self.weights(folder, "c", *flags, "--seed", 2)
        self.assert_same(one, again)
        self.assertGreater(self.difference(one, other), 0.01)

    def test_the_memory_format_changes_rounding_only(self):
        flags = ("--model", "convnet", "--max-epochs", 1, "--limit-train-batches", 4, "--seed", 3)
        with t.temporary_folder() as folder:
            contiguous = self.weights(folder, "a", *flags, "--memory-format", "contiguous")
            last = self.weights(folder, "b", *flags, "--memory-format", "channels-last", "--checkpoint-dir", folder / "run")
            auto = self.weights(folder, "c", *flags)
            two = self.weights(folder, "d", *flags, "--devices", 2, "--memory-format", "channels-last")
            two_contiguous = self.weights(folder, "e", *flags, "--devices", 2, "--memory-format", "contiguous")
            self.assertIn("memory-format = 'channels-last'", (folder / "run" / "config.toml").read_text())
            outcomes = {last_line(t.run(t.LOCKSTEP, "eval", "--model", "convnet", "--load-weights", folder / "b",
                                        "--memory-format", word)) for word in ("auto", "contiguous", "channels-last")}
            other = train(*flags, "--memory-format", "contiguous", "--checkpoint-dir", folder / "run", "--resume", "auto",
                          check=False)
        # Four steps of rate 0.01 from the same start: rounding at the seventh digit, grown a little.
        self.assert_same(contiguous, last, within=1e-4)
        self.assert_same(two_contiguous, two, within=1e-4)
        self.assertGreater(self.difference(contiguous, two), 1e-4, "the bound tells different runs apart")
        self.assertEqual({name: array.shape for name, array in last.items()},
                         {name: array.shape for name, array in contiguous.items()})
        # Which of the two auto is depends on the LibTorch; it is exactly one of them.
        self.assertIn(0.0, (self.difference(auto, last), self.difference(auto, contiguous)))
        self.assertEqual(len(outcomes), 1, outcomes)
        self.assertIn("--memory-format 'channels-last' in the checkpoint, 'contiguous' in this run", other.stderr)

    def test_a_seed_may_be_negative_as_in_python(self):
        try:
            import torch
        except ImportError:
            self.skipTest("this Python has no torch")
        with t.temporary_folder() as folder:
            ours = self.weights(folder, "a", "--max-epochs", 0, "--seed", -1)
            same = self.weights(folder, "b", "--max-epochs", 0, "--seed", 2**64 - 1)
        torch.manual_seed(-1)
        theirs = torch.nn.Linear(784, 128).weight.detach().numpy()
        self.assert_same(ours, same)
        self.assertEqual(ours["layers.0.weight"].tobytes(), theirs.tobytes())

    def test_adamw_decays_as_in_pytorch_unless_told(self):
        with t.temporary_folder() as folder:
            flags = ("--max-epochs", 1, "--limit-train-batches", 20, "--optimizer", "adamw")
            default = self.weights(folder, "a", *flags)
            self.assert_same(default, self.weights(folder, "b", *flags, "--weight-decay", 0.01))
            self.assertGreater(self.difference(default, self.weights(folder, "c", *flags, "--weight-decay", 0)), 1e-6)

    def test_two_accumulated_batches_are_one_of_twice_the_size(self):
        with t.temporary_folder() as folder:
            flags = ("--max-epochs", 1, "--devices", 2)
            whole = self.weights(folder, "a", *flags, "--batch-size", 64, "--limit-train-batches", 10)
            halves = self.weights(folder, "b", *flags, "--batch-size", 32, "--limit-train-batches", 20,
                                  "--accumulate-grad-batches", 2)
        # The same sums in another order: rounding only, grown over 10 steps.
        self.assert_same(whole, halves, within=1e-5)

    def test_a_gradient_clipped_to_nothing_moves_nothing(self):
        with t.temporary_folder() as folder:
            fresh = self.weights(folder, "a", "--max-epochs", 0)
            clipped = self.weights(folder, "b", "--max-epochs", 1, "--gradient-clip-val", 1e-12)
            free = self.weights(folder, "c", "--max-epochs", 1)
        self.assert_same(fresh, clipped, within=1e-8)
        self.assertGreater(self.difference(fresh, free), 0.01)

    def test_workers_change_nothing(self):
        with t.temporary_folder() as folder:
            flags = ("--max-epochs", 1, "--limit-train-batches", 10)
            self.assert_same(self.weights(folder, "a", *flags), self.weights(folder, "b", *flags, "--num-workers", 2))

    def test_schedule_and_warm_up_show_in_the_metrics(self):
        with t.temporary_folder() as folder:
            metrics = folder / "m.jsonl"
            train("--max-epochs", 2, "--limit-train-batches", 10, "--lr", 0.1, "--schedule", "cosine",
                  "--warmup-steps", 4, "--log-every-n-steps", 1, "--metrics-file", metrics)
            rates = [row["lr"] for row in rows_of(metrics) if row["split"] == "train"]
        self.assertEqual(len(rates), 20)
        for rate, expected in zip(rates[:4], (0.025, 0.05, 0.075, 0.1)):
            self.assertAlmostEqual(rate, expected)
        self.assertTrue(all(a > b for a, b in zip(rates[4:], rates[5:])), rates)
        self.assertLess(rates[-1], 0.01)

    def test_step_schedule_counts_epochs(self):
        with t.temporary_folder() as folder:
            metrics = folder / "m.jsonl"
            train("--max-epochs", 3, "--limit-train-batches", 2, "--lr", 0.1, "--schedule", "step",
                  "--lr-gamma", 0.5, "--log-every-n-steps", 1, "--metrics-file", metrics)
            rates = [row["lr"] for row in rows_of(metrics) if row["split"] == "train"]
        for rate, expected in zip(rates, (0.1, 0.1, 0.05, 0.05, 0.025, 0.025)):
            self.assertAlmostEqual(rate, expected)

    def test_early_stop_and_best_weights(self):
        with t.temporary_folder() as folder:
            best = folder / "best.safetensors"
            result = train("--max-epochs", 9, "--lr", 0, "--early-stop-patience", 2, "--limit-train-batches", 2,
                           "--save-best", best, "--devices", 2)
            self.assertIn("stopped early", result.stdout)
            self.assertEqual(len(re.findall(r"^epoch \d/9  train", result.stdout, re.M)), 3)
            # A rate of 0 changes nothing: the best are the fresh weights.
            fresh = last_line(train("--max-epochs", 0))
            self.assertEqual(last_line(t.run(t.LOCKSTEP, "eval", "--load-weights", best)), fresh)

    def test_deterministic_goes_with_every_model_of_images(self):
        for model in ("convnet", "fashion-cnn", "mlp"):
            train("--deterministic", "--limit-train-batches", 2, "--limit-val-batches", 1, "--max-epochs", 1, "--model", model)

    def test_threads_are_taken(self):
        """Each team of OpenMP's has so many, the thread that calls it included."""
        alone, two, four = (self.threads_of_a_training(threads) for threads in (1, 2, 4))
        self.assertGreater(two, alone)
        self.assertEqual(four - alone, 3 * (two - alone))

    def threads_of_a_training(self, threads):
        with t.temporary_folder() as folder:
            metrics = folder / "m.jsonl"
            process = subprocess.Popen([t.LOCKSTEP, "train", "--model", "convnet", "--max-epochs", "100000", "--threads",
                                        str(threads), "--log-every-n-steps", "1", "--metrics-file", str(metrics), "--quiet"],
                                       env=t.clean_environment())
            try:
                t.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60, "the first metrics")
                return len(os.listdir(f"/proc/{process.pid}/task"))
            finally:
                process.kill()
                process.wait()


class Files(unittest.TestCase):

    def test_metrics_rows(self):
        with t.temporary_folder() as folder:
            metrics = folder / "m.jsonl"
            result = train("--devices", 2, "--max-epochs", 2, "--metrics-file", metrics, "--log-every-n-steps", 20)
            rows = rows_of(metrics)
        keys = ["step", "split", "epoch", "loss", "accuracy", "lr", "samples_per_s", "seconds"]
        self.assertTrue(all(list(row) == keys for row in rows))
        # 10000 samples over 2 ranks of 64: 79 steps an epoch, the last of each in a row of its own.
        self.assertEqual([row["step"] for row in rows if row["split"] == "train"],
                         [20, 40, 60, 79, 80, 100, 120, 140, 158])
        tests = [row for row in rows if row["split"] == "test"]
        self.assertEqual([(row["step"], row["epoch"]) for row in tests], [(79, 1), (158, 2)])
        self.assertEqual(last_line(result), f"test accuracy {tests[-1]['accuracy']:.4f} loss {tests[-1]['loss']:.4f}")
        self.assertTrue(all(row["samples_per_s"] > 0 for row in rows))

    def test_flags_win_over_the_configuration_file_and_the_resolved_one_is_saved(self):
        import tomllib

        with t.temporary_folder() as folder:
            config = folder / "run.toml"
            config.write_text("max_epochs = 1\nlimit-train-batches = 4\nbatch-size = 16\nlr = 0.5\n")
            saved = folder / "checkpoints"
            result = train("--config", config, "--batch-size", 8, "--checkpoint-dir", saved)
            self.assertIn("batch size 8 per rank", result.stdout)
            self.assertIn("4 steps in 1 epoch\n", result.stdout)
            resolved = tomllib.loads((saved / "config.toml").read_text())
            self.assertEqual(resolved["batch-size"], 8)
            self.assertEqual(resolved["lr"], 0.5)
            self.assertEqual(resolved["momentum"], 0.9)
            again = train("--config", saved / "config.toml", "--checkpoint-dir", folder / "other")
            self.assertEqual(last_line(again), last_line(result))


    def test_every_configuration_key_is_a_flag_and_every_flag_a_key(self):
        import tomllib

        keys = set()
        for own in ("weight-decay = 0\nstrategy = \"pipeline\"\nnum-micro-batches = 2\n",
                    "strategy = \"dp\"\ndp-replicas = 2\noptimizer = \"lbfgs\"\nmax-iter = 2\nhistory-size = 3\n",
                    "strategy = \"fsdp\"\nfsdp-min-unit-elements = 9\n",
                    "min-ranks = 1\nbucket-cap-mb = 1\ntest-fraction = 0.5\nmodel = \"gpt:layers=1,heads=1,channels=8,context=8\"\n"
                    f"dataset = \"text:{__file__}\"\n"):
            with t.temporary_folder() as folder:
                optional = folder / "run.toml"
                optional.write_text("threads = 1\ntimeout = 60\nlimit-train-batches = 1\nlimit-val-batches = 1\nshutdown-timeout = 5\n"
                                    "global-batch-size = 64\n" + own)
                train("--config", optional, "--checkpoint-dir", folder / "saved", "--max-epochs", 1)
                keys |= set(tomllib.loads((folder / "saved" / "config.toml").read_text()))
        flags = set(re.findall(r"^  --([a-z-]+)", train("--help-all").stdout, re.M))
        # --resume says where this run stands, not what it is.
        self.assertEqual(keys, flags - {"config", "resume", "help-all"})


class Terminal(unittest.TestCase):

    def on_terminal(self, *flags, **env):
        leader, follower = pty.openpty()
        process = subprocess.Popen([t.LOCKSTEP, "train", *map(str, flags)], stdout=follower, stderr=follower,
                                   stdin=subprocess.DEVNULL, env=t.clean_environment(**{"TERM": "xterm", **env}))
        os.close(follower)
        output = b""
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            if not select.select([leader], [], [], 1)[0]:
                continue
            try:
                output += os.read(leader, 1 << 16)
            except OSError:  # the last holder of the other end is gone
                break
        os.close(leader)
        self.assertEqual(process.wait(timeout=10), 0, output)
        return output.decode()

    def test_one_live_bar(self):
        output = self.on_terminal("--max-epochs", 3, "--devices", 2)
        bars = re.findall(r"\repoch \d/3 \[[^\r\n]*\x1b\[K", output)
        self.assertGreater(len(bars), 1, output)
        self.assertTrue(any("samples/s" in bar and "ETA" in bar and "loss" in bar for bar in bars), bars)
        self.assertIn("\x1b[32m", output)
        self.assertNotIn("  step 50/", output)
        self.assertRegex(output, r"test accuracy \S+ loss \S+\r\n\Z")

    def test_the_first_bars_have_a_loss_and_a_speed(self):
        output = self.on_terminal("--max-epochs", 1, "--log-every-n-steps", 100000)
        bars = re.findall(r"\repoch 1/1 \[[^\r\n]*\x1b\[K", output)
        self.assertTrue(bars, output)
        for bar in bars:
            self.assertRegex(bar, r"loss \d+\.\d{4}  [1-9]\d* samples/s  ETA ")

    def test_no_color_is_honoured(self):
        output = self.on_terminal("--max-epochs", 2, NO_COLOR="1")
        self.assertIn("\repoch ", output)
        self.assertNotRegex(output, r"\x1b\[\d+m")

    def test_a_terminal_without_abilities_gets_plain_lines(self):
        flags = ("--max-epochs", 1, "--log-every-n-steps", 40)
        self.assertRegex(self.on_terminal(*flags), r"\repoch 1/1 \[")
        for name in ("dumb", ""):
            output = self.on_terminal(*flags, TERM=name)
            self.assertIn("epoch 1/1  step 40/157  loss ", output)
            self.assertNotIn("\x1b", output)
            self.assertNotRegex(output, r"\r(?!\n)")
        result = train("--max-epochs", 1, "--log-every-n-steps", 40)
        self.assertIn("epoch 1/1  step 40/157  loss ", result.stdout)
        self.assertNotIn("\r", result.stdout)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class Ending(unittest.TestCase):
    """Signals and closed pipes, at a moment when training is under way."""

    def start(self, folder, *flags, stdout=subprocess.PIPE, ignored=()):
        def ignore():
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        metrics = folder / "m.jsonl"
        process = subprocess.Popen(
            [t.LOCKSTEP, "train", "--max-epochs", "1000000", "--log-every-n-steps", "5",
             "--metrics-file", str(metrics), *map(str, flags)],
            stdout=stdout, stderr=subprocess.PIPE, text=True, env=t.clean_environment(), start_new_session=True,
            preexec_fn=ignore)
        self.addCleanup(self.end, process)
        return process, metrics

    def end(self, process):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def assert_all_gone(self, process):
        t.wait_until(lambda: not group_members(process.pid), 10, "the end of every process")

    def test_signals_end_it_in_order_with_a_checkpoint(self):
        """The short form sends each of them to one process or to two."""
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131),
                             (signal.SIGUSR1, 138)):
            for devices in (1, 2) if LONG else (1 + code % 2,):
                with self.subTest(signal=number, devices=devices), t.temporary_folder() as folder:
                    saved = folder / "saved"
                    process, metrics = self.start(folder, "--devices", devices, "--checkpoint-dir", saved)
                    t.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60, "the first metrics")
                    process.send_signal(number)
                    out, err = process.communicate(timeout=30)
                    self.assertEqual(process.returncode, code, out + err)
                    self.assertIn(f"stopped by {number.name}", out + err)
                    self.assert_all_gone(process)
                    self.assertTrue((saved / "latest" / "state.json").exists(), out + err)

    def test_a_signal_to_the_process_and_again_to_its_group_is_one(self):
        """As `timeout` and terminals send it."""
        for devices in (1, 2):
            with self.subTest(devices=devices), t.temporary_folder() as folder:
                saved = folder / "saved"
                process, metrics = self.start(folder, "--devices", devices, "--checkpoint-dir", saved)
                t.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60, "the first metrics")
                process.send_signal(signal.SIGTERM)
                os.killpg(process.pid, signal.SIGTERM)
                out, err = process.communicate(timeout=30)
                self.assertEqual(process.returncode, 143, out + err)
                self.assertTrue((saved / "latest" / "state.json").exists(), out + err)

    def test_what_the_parent_ignores_stays_ignored(self):
        """Shells without job control start background jobs so."""
        for devices in (1, 2):
            with self.subTest(devices=devices), t.temporary_folder() as folder:
                process, metrics = self.start(folder, "--devices", devices, ignored=(signal.SIGINT, signal.SIGQUIT))
                t.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60, "the first metrics")
                for number in (signal.SIGINT, signal.SIGQUIT):
                    before = metrics.stat().st_size
                    os.killpg(process.pid, number)
                    t.wait_until(lambda: metrics.stat().st_size > before + 2000 or process.poll() is not None, 60,
                                 "more metrics")
                    self.assertIsNone(process.poll())
                process.send_signal(signal.SIGTERM)
                out, err = process.communicate(timeout=30)
                self.assertEqual(process.returncode, 143, out + err)

    def test_a_signal_at_any_moment_is_no_success_and_leaves_nothing(self):
        seed = int(os.environ.get("LOCKSTEP_TEST_SEED", random.randrange(1 << 30)))
        print(f"LOCKSTEP_TEST_SEED={seed}", file=sys.stderr)
        rng = random.Random(seed)
        for i in range(8 if LONG else 4):
            number = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[i % 3]
            with self.subTest(i=i, signal=number), t.temporary_folder() as folder:
                process, _ = self.start(folder, "--devices", 1 + i % 2)
                try:  # a random moment of start-up or of the first steps
                    process.wait(timeout=rng.uniform(0.01, 1.5))
                except subprocess.TimeoutExpired:
                    process.send_signal(number)
                out, err = process.communicate(timeout=60)
                # Before there is a handler the signal itself ends the process.
                self.assertIn(process.returncode, (128 + number, -number), out + err)
                self.assert_all_gone(process)

    def test_ctrl_c_reaches_every_process_and_still_ends_in_order(self):
        with t.temporary_folder() as folder:
            process, metrics = self.start(folder, "--devices", 2, "--checkpoint-dir", folder / "saved")
            t.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60, "the first metrics")
            # Of every process but the supervisor, which no terminal reaches: the parent forwards it as well.
            ranks = [pid for pid in processes_below(process.pid) if name_of(pid) != "supervisor"]
            self.assertEqual(len(ranks), 2, ranks)
            for pid in [*ranks, process.pid]:
                os.kill(pid, signal.SIGINT)
            out, err = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 130, out + err)
            self.assert_all_gone(process)
            self.assertFalse([pid for pid in ranks if alive(pid)])
            self.assertTrue((folder / "saved" / "latest" / "state.json").exists(), out + err)

    def test_a_rank_that_is_stopped_again_and_again_is_told_as_slow(self):
        with t.temporary_folder() as folder:
            # Steps that are longer than the pauses.
            process, metrics = self.start(folder, "--devices", 2, "--batch-size", 4096)
            lines = []
            reader = threading.Thread(target=lambda: [lines.append(line) for line in process.stderr])
            reader.start()
            t.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60, "the first metrics")
            victim = next(pid for pid in processes_below(process.pid) if name_of(pid) != "supervisor")
            told = re.compile(r"rank [01] is slow: its own part of a step takes [\d.]+ ms, that of the other ranks [\d.]+ ms")
            deadline = time.monotonic() + 90
            while not any(map(told.search, lines)) and time.monotonic() < deadline:
                os.kill(victim, signal.SIGSTOP)
                time.sleep(0.01)
                os.kill(victim, signal.SIGCONT)
                time.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            reader.join(30)
            self.assertTrue(any(map(told.search, lines)), lines)

    def test_a_closed_pipe_is_no_success(self):
        for devices in (1, 2):
            with self.subTest(devices=devices), t.temporary_folder() as folder:
                process, _ = self.start(folder, "--devices", devices)
                process.stdout.readline()
                process.stdout.close()
                process.stdout = None
                _, err = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 128 + signal.SIGPIPE, err)
                self.assertIn("SIGPIPE", err)
                self.assert_all_gone(process)


if __name__ == "__main__":
    t.main()
