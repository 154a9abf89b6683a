"""What ranks write of their last calls when a job fails, as `lockstep debug` and PyTorch's fr_trace read it."""

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import unittest

import lockstep_testing as t
from lockstep_testing import temporary_folder, wait_until
from run_testing import lockstep_run

RANK = t.BUILD_DIR / "tests" / "lockstep_fault_rank"
HAS_TORCH = importlib.util.find_spec("torch") is not None
LIMIT = 3  # Of a call. The job's ranks start within it.


def job(folder, mode, backend, **env):
    """Three ranks, of which number 1 misses a call or differs."""
    return lockstep_run("--nproc-per-node", 3, RANK, mode, "env://", LIMIT,
                        env={"TORCH_FR_DUMP_TEMP_FILE": f"{folder}/rank_", "TEST_BACKEND": backend, "TEST_VICTIM": "1", **env})


def calls_of(folder, rank):
    trace = pickle.loads((folder / f"rank_{rank}").read_bytes())
    return [(e["collective_seq_id"], e["profiling_name"], e["state"]) for e in trace["entries"]]


def debug(folder):
    return t.run(t.LOCKSTEP, "debug", *sorted(folder.glob("rank_*"))).stdout


def fr_trace(folder, *flags):
    result = t.run(sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, *flags)
    return result.stdout + result.stderr


class Traces(unittest.TestCase):
    def test_a_missing_rank_is_named(self):
        for backend in ("shm", "gloo"):
            with self.subTest(backend), temporary_folder() as folder:
                code, out, err = job(folder, "miss", backend)
                self.assertNotEqual(code, 0, out + err)
                self.assertEqual(sorted(os.listdir(folder)), ["rank_0", "rank_1", "rank_2"], out + err)
                for rank in (0, 2):
                    self.assertEqual(calls_of(folder, rank)[-1], (6, "gloo:broadcast", "started"))
                # The launcher ends it by TERM, and so it tells of itself.
                self.assertEqual(calls_of(folder, 1)[-1], (5, "gloo:all_reduce", "completed"))
                text = debug(folder)
                self.assertRegex(text, r"collective 6:\n.*ranks 0, 2 called broadcast\(root 0\) of Float \[3, 4\]")
                self.assertRegex(text, r"rank 1 did not come: its last was 5, all_reduce\(sum\) of Float \[3, 4\], completed")
                if HAS_TORCH:
                    self.assertRegex(fr_trace(folder), r"(?s)Not all ranks joining collective, sequence number: 6.*missing ranks: \{1\}")
                if HAS_TORCH and importlib.util.find_spec("tabulate"):
                    self.assertEqual(fr_trace(folder, "-j").count("broadcast(input_sizes=[[3, 4]], state=started)"), 2)

    def test_different_calls_are_told(self):
        for backend in ("shm", "gloo"):
            with self.subTest(backend), temporary_folder() as folder:
                code, out, err = job(folder, "differ", backend)
                self.assertNotEqual(code, 0, out + err)
                self.assertEqual(sorted(os.listdir(folder)), ["rank_0", "rank_1", "rank_2"], out + err)
                text = debug(folder)
                self.assertIn("rank 1 called all_reduce(sum) of Float [5]", text)
                self.assertIn("ranks 0, 2 called all_reduce(sum) of Float [3, 4]", text)
                if HAS_TORCH:
                    self.assertRegex(fr_trace(folder), r"(?s)Collective sequence number: 6 has errors.*SIZE_OR_SYNTAX_MISMATCH")

    def test_a_job_without_failure_writes_nothing_and_usr2_asks_for_it(self):
        with temporary_folder() as folder:
            env = t.clean_environment(TORCH_NCCL_DEBUG_INFO_TEMP_FILE=f"{folder}/rank_", TEST_BACKEND="shm")
            env.pop("TORCH_FR_DUMP_TEMP_FILE", None)
            process = subprocess.Popen([RANK, "loop", "env://", "30"], env=env, stdout=subprocess.PIPE, text=True)
            try:
                wait_until(lambda: process.stdout.readline().startswith("round 0"), 60)
                self.assertEqual(os.listdir(folder), [])
                process.send_signal(signal.SIGUSR2)
                wait_until(lambda: self.whole(folder / "rank_0"), 60)
                self.assertIsNone(process.poll())
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)
                self.assertEqual(process.returncode, -signal.SIGTERM)
            finally:
                process.kill()
                process.communicate()
            self.assertIn("the same collectives", debug(folder))

    @staticmethod
    def whole(path):
        try:
            return bool(calls_of(path.parent, 0))
        except (OSError, EOFError, pickle.UnpicklingError):
            return False

    def test_a_ring_of_the_users_size_and_none(self):
        for calls, kept in ((2, [5, 6]), (0, None)):
            with self.subTest(calls), temporary_folder() as folder:
                job(folder, "differ", "shm", TORCH_FR_BUFFER_SIZE=str(calls))
                self.assertEqual([c[0] for c in calls_of(folder, 0)] if kept else os.listdir(folder), kept or [])

    def test_what_is_no_trace_is_refused(self):
        with temporary_folder() as folder:
            (folder / "rank_0").write_bytes(b"\x80\x02nonsense")
            (folder / "other").write_bytes(b"")
            for name in ("rank_0", "rank_7", "other"):
                result = t.run(t.LOCKSTEP, "debug", folder / name, check=False)
                self.assertNotEqual(result.returncode, 0)
                self.assertIn(name, result.stderr)


if __name__ == "__main__":
    t.main()
