"""Ranks of an ElasticJob are killed at random moments. The others go on without a restart, new processes join them, and
no step is lost or made twice."""

import os
import pathlib
import random
import signal
import statistics
import subprocess
import tempfile
import time
import unittest

import lockstep_testing as t
from left_behind import LeftBehind

PROGRAM = t.BUILD_DIR / "tests" / "lockstep_recovery_rank"
SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = bool(os.environ.get("LOCKSTEP_LONG_TESTS"))
BATCH = 4


class Job:
    """One run of the program, with what its processes wrote."""

    def __init__(self, ranks, restarts, samples, optimizer, launcher=False, pause_us=300, backend="auto", timeout=60):
        self._folder = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self._folder.name)
        words = [PROGRAM, self.folder, ranks, restarts, samples, optimizer, pause_us, backend]
        if launcher:
            words = [t.LOCKSTEP, "run", "--nproc-per-node", ranks, "--max-restarts", restarts, *words]
        self.process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, env=t.clean_environment(OMP_NUM_THREADS="1", LOCKSTEP_TIMEOUT=timeout))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self._folder.cleanup()

    def pids(self):
        """Of the ranks that have started, the oldest first."""
        files = sorted(self.folder.glob("pid-*"), key=lambda path: path.stat().st_mtime_ns)
        return [int(path.name[4:]) for path in files]

    def living(self):
        return [pid for pid in self.pids() if is_alive(pid)]

    def living_with_state(self):
        return [pid for pid in self.living() if self.last(pid)]

    def steps(self, pid):
        """(number, samples seen, ranks, microseconds, generation) of each whole line."""
        path = self.folder / f"steps-{pid}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]

    def last(self, pid):
        return last_line(self.folder / f"steps-{pid}")

    def last_step(self):
        return max((last[0] for last in map(self.last, self.pids()) if last), default=0)

    def wait_for(self, condition, what, seconds=60):
        limit = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended before {what}: {self.process.communicate()}"
            if time.monotonic() >= limit:
                self.process.terminate()
                raise AssertionError(f"no {what} within {seconds} s: {self.process.communicate()}")
            time.sleep(0.002)

    def generation(self):
        return max((last[4] for last in map(self.last, self.pids()) if last), default=0)

    def kill(self, pid, number=signal.SIGKILL):
        """The seconds until the others have finished a step of their next generation."""
        before = self.generation()
        now = time.monotonic_ns() // 1000
        os.kill(pid, number)
        self.wait_for(lambda: not is_alive(pid), "end of the rank")
        self.wait_for(lambda: self.generation() > before, "next generation")
        later = [step[3] for other in self.pids() for step in self.steps(other) if step[4] > before]
        return (min(later) - now) / 1e6

    def end(self, seconds=120):
        output, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, output, errors


def last_line(path):
    """The numbers of its last whole line. It is asked all the time, and reads the end only."""
    if not path.exists():
        return ()
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 256))
        lines = file.read().split(b"\n")[:-1]
    return tuple(map(int, lines[-1].split())) if lines else ()


def is_alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Recovery(unittest.TestCase):
    def setUp(self):
        self.left = LeftBehind()
        print(f"LOCKSTEP_FAULT_SEED={SEED}", flush=True)
        self.random = random.Random(SEED)

    def tearDown(self):
        self.left.expect_nothing()

    def check_history(self, job, samples):
        """All processes tell of the same steps, one after the other, from the first sample to the last."""
        seen = {}
        for pid in job.pids():
            for number, so_far, ranks, _, _ in job.steps(pid):
                self.assertEqual(seen.setdefault(number, (so_far, ranks)), (so_far, ranks), f"step {number} of {pid}")
        self.assertEqual(sorted(seen), list(range(1, len(seen) + 1)))
        before = 0
        for number in sorted(seen):
            so_far, ranks = seen[number]
            self.assertEqual(so_far, before + BATCH * ranks, f"step {number}")
            before = so_far
        self.assertGreaterEqual(before, samples)
        ends = [path.read_text().split() for path in job.folder.glob("end-*")]
        self.assertTrue(ends)
        self.assertTrue(all(end == ends[0] for end in ends), ends)
        self.assertEqual(int(ends[0][0]), len(seen))

    def test_undisturbed(self):
        with Job(2, 3, 400, "sgd") as job:
            code, _, errors = job.end()
            self.assertEqual((code, errors), (0, ""))
            self.check_history(job, 400)
            self.assertEqual(len(job.pids()), 2)

    def test_without_a_replacement_the_others_go_on(self):
        with Job(3, 0, 10_000, "adam") as job:
            job.wait_for(lambda: job.last_step() > self.random.randrange(5, 40), "steps")
            victim = self.random.choice(job.pids())
            job.kill(victim)
            code, _, errors = job.end()
            self.assertEqual(code, 0, errors)
            self.check_history(job, 10_000)
            self.assertEqual(len(job.pids()), 3)
            self.assertEqual(len(list(job.folder.glob("end-*"))), 2)

    def test_new_processes_take_the_place_of_the_dead(self):
        kills, samples, pause_us = (30, 400_000, 300) if LONG else (3, 16_000, 3000)
        for optimizer, backend in [("adam", "shm"), ("own", "gloo")]:
            # Gloo waits the whole time-out for a rank that dies while it connects: less than wait_for() does.
            with self.subTest(optimizer=optimizer), Job(3, kills, samples, optimizer, False, pause_us, backend, timeout=15) as job:
                took = []
                for number in range(kills):
                    # Into a step, the meeting of a new process, or what follows it.
                    wait = self.random.choice([0.0, 0.01, 0.1, 0.6 if LONG else 0.3])
                    moment = time.monotonic() + wait
                    job.wait_for(lambda: job.last_step() > 0 and time.monotonic() >= moment, "moment")
                    # The state lies with those that have made a step.
                    job.wait_for(lambda: len(job.living_with_state()) >= 2, "second process with the state")
                    victim = self.random.choice(job.living())
                    if victim in job.living_with_state():
                        took.append(job.kill(victim))
                    else:
                        os.kill(victim, signal.SIGKILL)
                code, _, errors = job.end(600)  # 400,000 samples over Gloo take minutes.
                self.assertEqual(code, 0, errors)
                self.check_history(job, samples)
                self.assertGreater(len(job.pids()), 3, "nobody was replaced")
                print(f"{backend}: from the kill to the next step, median {statistics.median(took):.3f} s, "
                      f"longest {max(took):.3f} s", flush=True)

    def test_the_last_one_that_dies_ends_the_job(self):
        with Job(2, 0, 1_000_000, "sgd") as job:
            job.wait_for(lambda: job.last_step() > 3, "steps")
            first, second = job.pids()
            job.kill(first)
            os.kill(second, signal.SIGKILL)
            code, _, errors = job.end()
            self.assertEqual(code, 128 + signal.SIGKILL, errors)

    def test_under_lockstep_run(self):
        with Job(2, 1, 20_000, "sgd", launcher=True) as job:
            job.wait_for(lambda: len(job.living_with_state()) == 2, "steps")
            job.kill(job.pids()[0])
            code, _, errors = job.end()
            self.assertEqual(code, 0, errors)
            self.check_history(job, 20_000)
            self.assertEqual(len(job.pids()), 3)

    def test_a_rank_that_stands_still_is_killed(self):
        with Job(2, 0, 10_000, "sgd", timeout=2) as job:
            job.wait_for(lambda: len(job.living_with_state()) == 2, "steps")
            os.kill(self.random.choice(job.pids()), signal.SIGSTOP)
            code, _, errors = job.end()
            self.assertEqual(code, 0, errors)
            self.assertIn("hangs", errors)
            self.check_history(job, 10_000)

    def test_a_signal_to_the_job_ends_it(self):
        with Job(2, 3, 1_000_000, "sgd") as job:
            job.wait_for(lambda: job.last_step() > 3, "steps")
            job.process.send_signal(signal.SIGTERM)
            self.assertEqual(job.end()[0], 128 + signal.SIGTERM)


if __name__ == "__main__":
    unittest.main()
