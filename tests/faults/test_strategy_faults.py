"""A rank that is killed in the middle of training ends the others with an error that names it, whichever
strategy spreads the model. LOCKSTEP_FAULT_SEED repeats a run."""

import os
import random
import re
import subprocess
import time
import unittest

import lockstep_testing as t
from left_behind import LeftBehind
from test_comm_faults import environment, hosted_store, mentions, started

SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")


def strategies():
    """Those of several processes."""
    text = t.run(t.LOCKSTEP, "train", "--help-all").stdout
    return [name for name in re.search(r"--strategy ([\w|]+)", text)[1].split("|") if name != "dp"]


def training(strategy, size, backend, port, metrics):
    command = [t.LOCKSTEP, "train", "--strategy", strategy, "--backend", backend, "--optimizer", "adam", "--max-epochs",
               1000, "--timeout", 30, "--log-every-n-steps", 1, "--metrics-file", metrics]
    return started(command, [environment(rank, size, port) for rank in range(size)])


class StrategyFaults(unittest.TestCase):
    def setUp(self):
        self.left_behind = LeftBehind()

    def tearDown(self):
        self.left_behind.expect_nothing()

    def kill_in(self, strategy, backend, seed):
        choose = random.Random(seed)
        size = choose.choice([2, 2, 3])
        victim = choose.randrange(size)
        delay = choose.uniform(0, 0.1)
        with t.temporary_folder() as folder, hosted_store() as (_, port):
            metrics = folder / "metrics.jsonl"
            with training(strategy, size, backend, port, metrics) as ranks:

                def steps():
                    for rank in ranks:
                        self.assertIsNone(rank.process.poll(), rank.lines[-10:])
                    return metrics.exists() and metrics.read_text().count("\n") >= 3

                t.wait_until(steps, 60, f"training by {strategy}")
                time.sleep(delay)  # The random moment; nothing is waited for.
                ranks[victim].process.kill()
                for index, rank in enumerate(ranks):
                    if index == victim:
                        continue
                    try:
                        code = rank.process.wait(25)
                    except subprocess.TimeoutExpired:
                        self.fail(f"rank {index} still runs: {rank.lines[-5:]}")
                    rank.reader.join(10)
                    self.assertEqual(code, 1, rank.lines[-5:])
                    errors = [line for line in rank.lines if "error" in line]
                    self.assertTrue(any(mentions(line, victim) for line in errors), rank.lines[-10:])

    def test_a_killed_rank_is_named(self):
        for number, strategy in enumerate(strategies()):
            for turn in range(20 if LONG else 1):
                seed = SEED + 100 * number + turn
                for backend in ("shm", "gloo") if LONG else ("shm",):
                    with self.subTest(f"{strategy} over {backend}, seed {seed}"):
                        self.kill_in(strategy, backend, seed)


if __name__ == "__main__":
    t.main()
