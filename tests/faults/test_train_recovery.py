"""Ranks of `lockstep train` are killed at random moments. The others keep what they have learnt, a new process takes the
place of the dead and gets the state from them, and the weights are those of a run that nobody disturbed."""

import collections
import functools
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
import unittest

import lockstep_testing as t
from left_behind import LeftBehind

SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = bool(os.environ.get("LOCKSTEP_LONG_TESTS"))
TRAINER_RANK = t.BUILD_DIR / "tests" / "lockstep_trainer_recovery_rank"
SAMPLES, BATCH = 10_000, 64


def steps_of(samples, ranks):
    return -(-samples // (ranks * BATCH))


def children(pid):
    try:
        return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class Training:
    """One run of `lockstep train` on digits."""

    def __init__(self, *words, devices=2, epochs=40):
        self._folder = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self._folder.name)
        self.metrics = self.folder / "metrics.jsonl"
        self.weights = self.folder / "w.safetensors"
        command = [t.LOCKSTEP, "train", "--dataset", "digits", "--devices", devices, "--max-epochs", epochs, "--metrics-file",
                   self.metrics, "--save-weights", self.weights, "--log-every-n-steps", 1, *words]
        # Files, as nobody reads a pipe while ranks are killed: a full one would stop rank 0.
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            self.process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=err,
                                            env=t.clean_environment(OMP_NUM_THREADS="1", LOCKSTEP_TIMEOUT="60"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()

    def ranks(self):
        return [pid for child in children(self.process.pid) for pid in children(child)]

    def rows(self, split="train"):
        lines = self.metrics.read_text().splitlines(keepends=True) if self.metrics.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if row["split"] == split]

    def last_step(self):
        """By the end of the file: it is asked all the time, and takes no processor from the ranks."""
        if not self.metrics.exists():
            return 0
        with open(self.metrics, "rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - 4096)
            file.seek(begin)
            lines = file.read().split(b"\n")[begin > 0:-1]
        return max((row["step"] for row in map(json.loads, lines) if row["split"] == "train"), default=0)

    def wait_for_step_after(self, step, what="step"):
        """Seconds until there is one; none when the run has ended."""
        begin = time.monotonic()
        while self.last_step() <= step:
            if self.process.poll() is not None:
                return None
            assert time.monotonic() < begin + 60, f"no {what} after {step} within 60 s: {self.stop()}"
            time.sleep(0.001)
        return time.monotonic() - begin

    def kill(self, pid, number=signal.SIGKILL):
        """Seconds until the others have finished a step of their next generation."""
        os.kill(pid, number)
        begin = time.monotonic()
        while pid in self.ranks() and self.process.poll() is None:
            time.sleep(0.0005)
        self.wait_for_step_after(self.last_step())
        return time.monotonic() - begin

    def stop(self):
        self.process.terminate()
        return self.end()

    def end(self, seconds=180):
        code = self.process.wait(seconds)
        return code, (self.folder / "out").read_text(), (self.folder / "err").read_text()

    def digest(self):
        return hashlib.sha256(self.weights.read_bytes()).hexdigest()


class TrainerRecovery(unittest.TestCase):
    """A Trainer in an ElasticJob, which goes on with any number of ranks."""

    def setUp(self):
        self.left = LeftBehind()
        self.random = random.Random(SEED)

    def tearDown(self):
        self.left.expect_nothing()

    def check_samples(self, folder, epochs):
        """Each sample is used once in each epoch, by the steps that count."""
        finished, begun, used = {}, {}, {}
        for path in folder.glob("finished-*"):
            for line in path.read_text().splitlines():
                generation, step = map(int, line.split())
                finished[step] = max(finished.get(step, 0), generation)
        for path in folder.glob("begun-*"):
            for line in path.read_text().splitlines():
                generation, step, epoch, *samples = map(int, line.split())
                begun.setdefault(step, {}).setdefault(generation, []).append((epoch, samples))
        for step, generation in finished.items():
            # A generation that begins with a finished step tells its callbacks of it.
            last = max(made for made in begun[step] if made <= generation)
            for epoch, samples in begun[step][last]:
                used.setdefault(epoch, []).extend(samples)
        self.assertEqual(sorted(finished), list(range(1, len(finished) + 1)))
        self.assertEqual(sorted(used), list(range(epochs)))
        for epoch, samples in used.items():
            self.assertEqual(sorted(samples), list(range(1000)), f"epoch {epoch}")

    def test_each_sample_is_used_once(self):
        kills, epochs = (40, 300) if LONG else (4, 30)
        with t.temporary_folder() as folder:
            process = subprocess.Popen([TRAINER_RANK, folder, "3", str(kills), str(epochs)], stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, env=t.clean_environment(LOCKSTEP_TIMEOUT="60"))
            try:
                t.wait_until(lambda: len([path for path in folder.glob("finished-*") if path.stat().st_size]) == 3, 60, "steps")
                killed = set()  # A dead process stays a child for a moment.
                for _ in range(kills):
                    time.sleep(self.random.choice([0.0, 0.05, 0.3, 1.0]) * self.random.random())
                    # The state lies with those that have made a step.
                    alive = [pid for child in children(process.pid) for pid in children(child) if pid not in killed]
                    made = [pid for pid in alive if (folder / f"finished-{pid}").exists()
                            and (folder / f"finished-{pid}").stat().st_size]
                    if process.poll() is None and len(made) >= 2:
                        victim = self.random.choice(alive)
                        os.kill(victim, signal.SIGKILL)
                        killed.add(victim)
                _, errors = process.communicate(timeout=180)
            finally:
                process.kill()
                process.communicate()
            self.assertEqual(process.returncode, 0, errors)
            self.assertIn("go on without it", errors)
            self.check_samples(folder, epochs)
            ends = {path.read_text() for path in folder.glob("end-*")}
            self.assertEqual(len(ends), 1, ends)


@functools.cache
def undisturbed(*words, devices=2, epochs=20):
    with Training(*words, devices=devices, epochs=epochs) as job:
        code, output, errors = job.end()
        assert code == 0, errors
        return job.digest(), [(row["epoch"], row["loss"]) for row in job.rows("test")], output.splitlines()[-1]


class TrainRecovery(unittest.TestCase):
    def setUp(self):
        self.left = LeftBehind()
        print(f"LOCKSTEP_FAULT_SEED={SEED}", flush=True)
        self.random = random.Random(SEED)

    def tearDown(self):
        self.left.expect_nothing()

    def check_rows(self, job, epochs, kills=1):
        """Each step has a row of its own, less one that rank 0 was writing as it died. Each epoch has one evaluation."""
        steps = [row["step"] for row in job.rows()]
        self.assertLessEqual(len(set(range(1, steps[-1] + 1)) - set(steps)), kills)
        self.assertLessEqual(len(steps) - len(set(steps)), kills)
        self.assertEqual(steps, sorted(steps))
        self.assertEqual([row["epoch"] for row in job.rows("test")], list(range(1, epochs + 1)))

    def check_kills(self, kills, devices, epochs, *words, of=(), after=0):
        """`of` are words of both runs. The kills come after so many steps."""
        expected = undisturbed(*map(str, of), devices=devices, epochs=epochs)
        with Training("--max-restarts", kills, *of, *words, devices=devices, epochs=epochs) as job:
            took = []
            for _ in range(kills):
                # Into a step, an evaluation, a save, or the meeting after the kill before.
                time.sleep(self.random.choice([0.0, 0.05, 0.2, 0.5]) * self.random.random())
                if job.wait_for_step_after(after) is None:
                    break
                ranks = job.ranks()
                if job.process.poll() is not None:
                    break
                if len(ranks) < 2:
                    continue
                took.append(job.kill(self.random.choice(ranks)))
            code, output, errors = job.end()
            self.assertEqual(code, 0, errors)
            self.check_rows(job, epochs, len(took))
            got = job.digest(), [(row["epoch"], row["loss"]) for row in job.rows("test")], output.splitlines()[-1]
            self.assertEqual(got, expected)
            self.assertRegex(output, "resumed (from a snapshot )?after step")
            self.assertNotIn("all ranks start again", errors)
            print(f"{' '.join(map(str, of))} {devices} ranks: {len(took)} kills, from one to the next step median {statistics.median(took):.3f} s, "
                  f"longest {max(took):.3f} s", flush=True)
            return job.folder

    def test_the_bits_are_those_of_an_undisturbed_run(self):
        for devices in (2, 3):
            with self.subTest(devices=devices):
                self.check_kills(30 if LONG else 3, devices, 600 if LONG else 20)

    def test_with_checkpoints(self):
        with tempfile.TemporaryDirectory() as folder:
            words = ("--checkpoint-dir", folder, "--checkpoint-every", 7, "--early-stop-patience", 1000)
            epochs = 400 if LONG else 20
            self.check_kills(30 if LONG else 3, 2, epochs, *words)
            steps = steps_of(SAMPLES, 2) * epochs
            self.assertEqual(os.readlink(f"{folder}/latest"), f"step-{steps:08}")
            self.assertEqual([name for name in os.listdir(folder) if name.startswith(".tmp")], [])

    def test_parts_of_the_state_come_back_from_a_snapshot(self):
        alone = [(strategy, "", 2) for strategy in ("zero1", "zero2", "fsdp", "pipeline")]
        meshes = [("ddp", "pp=2,dp=2", 4), ("zero1", "dp_replicate=2,dp_shard=2", 4), ("zero2", "pp=2,dp=2", 4),
                  ("fsdp", "dp_replicate=2,dp_shard=2", 4), ("fsdp", "pp=2,dp_shard=2", 4)]
        some = alone + meshes if LONG else [self.random.choice(alone), self.random.choice(meshes)]
        for strategy, mesh, devices in some:
            with self.subTest(strategy=strategy, mesh=mesh), tempfile.TemporaryDirectory() as folder:
                # Of the launcher's own folder, or in memory beside checkpoints.
                words = self.random.choice([(), ("--checkpoint-dir", folder)]) + self.random.choice([(), ("--snapshot-every", 20)])
                of = ("--strategy", strategy, "--limit-train-batches", 60) + (("--mesh", mesh) if mesh else ())
                self.check_kills(30 if LONG else 2, devices, 300 if LONG else 10, *words, after=250, of=of)

    def test_logical_shards_have_the_same_bits_with_fewer_ranks_between(self):
        shards = ("--logical-shards", 4, "--batch-size", 32)
        self.check_kills(20 if LONG else 2, 3, 100 if LONG else 6, "--min-ranks", 1, "--snapshot-every", 20, of=shards,
                         after=100)

    @unittest.skipUnless(LONG, "LOCKSTEP_LONG_TESTS is not set: this takes ten minutes")
    def test_soak(self):
        end = time.monotonic() + 600
        while time.monotonic() < end:
            strategy = self.random.choice(["ddp", "zero1", "zero2", "fsdp", "pipeline"])
            self.check_kills(10_000, self.random.choice([2, 3]), 60, "--snapshot-every", 20, of=("--strategy", strategy),
                             after=100)

    def test_it_grows_when_a_new_process_comes(self):
        with Training("--min-ranks", 1, "--max-restarts", 1, epochs=1000) as job:
            job.wait_for_step_after(self.random.randrange(1, 200))
            job.kill(self.random.choice(job.ranks()))
            epoch, of_whole_epochs = job.rows()[-1]["epoch"], []
            while steps_of(SAMPLES, 2) not in of_whole_epochs:
                self.assertIsNotNone(job.wait_for_step_after(job.last_step() + steps_of(SAMPLES, 1)), of_whole_epochs)
                steps = collections.Counter(row["epoch"] for row in job.rows())
                of_whole_epochs = [steps[row["epoch"]] for row in job.rows("test") if row["epoch"] > epoch]
            code, output, errors = job.stop()
            self.assertEqual(code, 128 + signal.SIGTERM, errors)
            self.check_rows(job, job.rows("test")[-1]["epoch"])
            # As one rank, unless the new process was quick, and as two.
            self.assertIn(output.count("resumed after step"), (1, 2))

    def test_fewer_ranks_use_each_sample_once(self):
        with Training("--min-ranks", 2, devices=3, epochs=10) as job:
            job.wait_for_step_after(self.random.randrange(1, 200))
            job.kill(self.random.choice(job.ranks()))
            code, output, errors = job.end()
            self.assertEqual(code, 0, errors)
            self.check_rows(job, 10)
            found = re.search(r"resumed after step (\d+) \(epoch (\d+), after", output)
            step, epoch = int(found[1]), int(found[2])
            of_three = step - steps_of(SAMPLES, 3) * (epoch - 1)
            steps = of_three + steps_of(max(0, SAMPLES - of_three * 3 * BATCH), 2)
            made = [row["step"] for row in job.rows() if row["epoch"] == epoch]
            self.assertEqual(made[-1] - steps_of(SAMPLES, 3) * (epoch - 1), steps, (step, epoch))
            self.assertEqual(len([row for row in job.rows() if row["epoch"] == 10]), steps_of(SAMPLES, 2))

    def test_too_few_ranks_end_the_job(self):
        with Training(devices=2, epochs=1000) as job:
            job.wait_for_step_after(3)
            os.kill(job.ranks()[0], signal.SIGKILL)
            self.assertEqual(job.end()[0], 128 + signal.SIGKILL)

    def test_a_signal_that_comes_with_a_kill_saves(self):
        with tempfile.TemporaryDirectory() as folder:
            with Training("--checkpoint-dir", folder, "--max-restarts", 3, epochs=1000) as job:
                job.wait_for_step_after(30)
                job.kill(self.random.choice(job.ranks()))
                job.process.send_signal(signal.SIGTERM)
                code, output, errors = job.end()
                self.assertEqual(code, 128 + signal.SIGTERM, errors)
                self.assertIn("; the same command with --resume auto goes on from there", output)

    def test_under_lockstep_run(self):
        expected = undisturbed(devices=2, epochs=20)
        with tempfile.TemporaryDirectory() as folder:
            weights, metrics = f"{folder}/w.safetensors", pathlib.Path(folder, "m.jsonl")
            words = [t.LOCKSTEP, "run", "--nproc-per-node", "2", "--max-restarts", "1", t.LOCKSTEP, "train", "--dataset", "digits",
                     "--max-epochs", "20", "--save-weights", weights, "--metrics-file", metrics, "--log-every-n-steps", "1"]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                       env=t.clean_environment(OMP_NUM_THREADS="1"))
            try:
                t.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 5000, 60, "steps")
                os.kill(self.random.choice([pid for child in children(process.pid) for pid in children(child)]), signal.SIGKILL)
                output, errors = process.communicate(timeout=120)
            finally:
                process.kill()
                process.communicate()
            self.assertEqual(process.returncode, 0, errors)
            self.assertIn("resumed after step", output)
            self.assertEqual(hashlib.sha256(pathlib.Path(weights).read_bytes()).hexdigest(), expected[0])


if __name__ == "__main__":
    unittest.main()
