"""Jobs that start again after a failure: `lockstep run` and `lockstep train` with --max-restarts, and `lockstep::start`."""

import hashlib
import os
import pathlib
import random
import signal
import subprocess
import time
import unittest

import lockstep_testing as t
from run_testing import Launched, lockstep_run, processes_with, running, wait_for_files

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
SNAPSHOTS = t.BUILD_DIR / "examples/002_ddp_series/multigpu_torchrun"
START = t.BUILD_DIR / "tests/lockstep_start_program"


def setUpModule():
    print(f"LOCKSTEP_FAULT_SEED={SEED}", flush=True)


class Run(unittest.TestCase):
    def test_goes_on_from_its_snapshot_whenever_a_rank_is_killed(self):
        chance = random.Random(SEED)
        for _ in range(1 + 2 * LONG):
            with t.temporary_folder() as folder, \
                    Launched("--max-restarts", 3, "--nproc-per-node", 2, SNAPSHOTS, 150, 1, cwd=folder) as job:
                t.wait_until((folder / "snapshot.safetensors").exists, 60, "the first snapshot")
                time.sleep(chance.uniform(0, 0.3))
                os.kill(chance.choice(running(job.mark, SNAPSHOTS)), signal.SIGKILL)
                code, out, err = job.end(120)
                job.nothing_left()
                self.assertEqual(code, 0, err)
                self.assertIn("(restart 1 of 3)", err)
                self.assertIn("Epoch 149", out)

    def test_killed_before_it_has_formed(self):
        with t.temporary_folder() as folder, \
                Launched("--max-restarts", 1, "--nproc-per-node", 2, SNAPSHOTS, 2, 1, cwd=folder) as job:
            t.wait_until(lambda: running(job.mark, SNAPSHOTS), 60, "a rank")
            os.kill(running(job.mark, SNAPSHOTS)[0], signal.SIGKILL)
            code, _, err = job.end(120)
            self.assertEqual(code, 0, err)

    def test_attempts_have_numbers_logs_and_lines(self):
        with t.temporary_folder() as folder, t.temporary_folder() as out:
            said = "$OUT/$TORCHELASTIC_RESTART_COUNT"
            text = ("echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; "
                    f"[ $RANK = 0 ] && {{ touch {said}; exit 0; }}; until [ -e {said} ]; do sleep 0.01; done; "
                    "exit $((5 + TORCHELASTIC_RESTART_COUNT))")
            code, _, err = lockstep_run("--nproc-per-node", 2, "--max-restarts", 2, "--log-dir", folder, "--redirects", 1,
                                        "sh", "-c", text, env={"OUT": str(out)})
            self.assertEqual(code, 7)
            run = next(folder.iterdir())
            for attempt in range(3):
                for rank in range(2):
                    self.assertEqual((run / f"attempt_{attempt}/{rank}/stdout.log").read_text(), f"{attempt} of 2\n")
            self.assertRegex(err, r"error: rank 1 \(pid \d+\) exited with code 7\n")
            self.assertEqual([err.count(f"exited with code {c}") for c in (5, 6, 7)], [2, 2, 1], err)

    def started(self, *words):
        """The exit code, and how many attempts were made."""
        with t.temporary_folder() as folder:
            code, _, err = lockstep_run("--nproc-per-node", 2, "--max-restarts", 3, *words, env={"OUT": str(folder)})
            return code, len(list(folder.iterdir())), err

    def test_what_cannot_succeed_is_not_tried_again(self):
        count = "touch $OUT/$TORCHELASTIC_RESTART_COUNT; "
        self.assertEqual(self.started("sh", "-c", count + "exit 2")[:2], (2, 1))
        self.assertEqual(self.started("sh", "-c", count + "exit 3")[:2], (3, 4))
        self.assertEqual(self.started("sh", "-c", count + "[ $TORCHELASTIC_RESTART_COUNT = 2 ]")[:2], (0, 3))
        code, attempts, err = self.started("no-such-program")
        self.assertEqual((code, attempts), (2, 0), err)

    def test_a_signal_ends_all_attempts(self):
        with t.temporary_folder() as folder, \
                Launched("--nproc-per-node", 2, "--max-restarts", 3, "sh", "-c", "touch $OUT/$RANK; echo > $OUT/$RANK; sleep 1000",
                         env={"OUT": str(folder)}) as job:
            wait_for_files(folder / "0", folder / "1")
            job.send(signal.SIGTERM)
            code, _, err = job.end()
            job.nothing_left()
            self.assertEqual(code, 128 + signal.SIGTERM)
            self.assertNotIn("start again", err)

    def test_usr1_and_usr2_reach_the_workers_and_end_nothing(self):
        text = ("trap 'echo usr1 > $OUT/usr1.$RANK' USR1; trap 'echo usr2 > $OUT/usr2.$RANK; exit 0' USR2; echo > $OUT/$RANK; "
                "while :; do sleep 0.05; done")
        with t.temporary_folder() as folder, Launched("--nproc-per-node", 2, "sh", "-c", text, env={"OUT": str(folder)}) as job:
            wait_for_files(folder / "0", folder / "1")
            for name in ("usr1", "usr2"):
                job.send(getattr(signal, "SIG" + name.upper()))
                wait_for_files(folder / f"{name}.0", folder / f"{name}.1")
            self.assertEqual(job.end()[0], 0)

    def test_the_shutdown_timeout_counts_after_a_signal(self):
        text = "trap '' TERM; echo > $OUT/$RANK; while :; do sleep 0.05; done"
        for words, variables in ((("--shutdown-timeout", "0.1"), {}), ((), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "0.1"})):
            with t.temporary_folder() as folder, \
                    Launched(*words, "sh", "-c", text, env={"OUT": str(folder), **variables}) as job:
                wait_for_files(folder / "0")
                job.send(signal.SIGTERM)
                self.assertEqual(job.end(20)[0], 128 + signal.SIGTERM)


class Programs(unittest.TestCase):
    def test_start_with_restarts(self):
        with t.temporary_folder() as folder:
            env = t.clean_environment(OMP_NUM_THREADS="1", TEST_RESTARTS="2")
            result = subprocess.run([START, "killed-once"], env=env, cwd=folder, capture_output=True, text=True, timeout=120)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("(restart 1 of 2)", result.stderr)
            self.assertEqual(result.stdout, "finished after 1 restart\n")

    def train(self, folder, *words, kill=None):
        """The weights after training, with the rank that is killed after its first checkpoint."""
        env = t.clean_environment(OMP_NUM_THREADS="1")
        job = subprocess.Popen([t.LOCKSTEP, "train", "--dataset", "digits", "--devices", "2", "--max-epochs", "20", "--limit-val-batches", "1", "--checkpoint-dir",
                                folder / "run", "--save-weights", folder / "w.safetensors", *words], env=env, cwd=folder,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            if kill is not None:
                t.wait_until((folder / "run/latest").exists, 60, "the first checkpoint")
                time.sleep(kill.uniform(0, 0.2))
                children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
                ranks = [int(pid) for child in children
                         for pid in pathlib.Path(f"/proc/{child}/task/{child}/children").read_text().split()]
                os.kill(kill.choice(ranks), signal.SIGKILL)
            out, err = job.communicate(timeout=180)
        finally:
            job.kill()
            job.wait(20)
        self.assertEqual(job.returncode, 0, err)
        return out, err, hashlib.sha256((folder / "w.safetensors").read_bytes()).hexdigest()

    def test_train_goes_on_to_the_same_bits(self):
        with t.temporary_folder() as whole, t.temporary_folder() as killed:
            expected = self.train(whole)[2]
            out, err, got = self.train(killed, "--max-restarts", "3", kill=random.Random(SEED))
            self.assertIn("(restart 1 of 3)", err)
            self.assertIn("resumed after step", out)
            self.assertEqual(got, expected)

    def test_another_runs_checkpoints_are_not_gone_on_with(self):
        words = ("train", "--dataset", "digits", "--checkpoint-dir", "run", "--max-epochs")
        with t.temporary_folder() as folder:
            t.run(t.LOCKSTEP, *words, 1, "--devices", 2, cwd=folder)
            code, out, err = lockstep_run("--max-restarts", 3, "--nproc-per-node", 2, t.LOCKSTEP, *words, 2, cwd=folder)
            self.assertEqual(code, 2, err)
            self.assertNotIn("start again", err)
            self.assertNotIn("resumed", out)


if __name__ == "__main__":
    t.main()
