"""A rank that is killed in the middle of training with strategy fsdp: the others end with an error that names it."""

import json
import random
import signal
import subprocess
import time
import unittest

import lockstep_testing as t
from left_behind import LeftBehind

RANK = t.BUILD_DIR / "tests" / "lockstep_fsdp_rank"


class KilledRank(unittest.TestCase):
    def setUp(self):
        self.left_behind = LeftBehind()

    def tearDown(self):
        self.left_behind.expect_nothing()

    def kill_one(self, backend, size, share_memory=True):
        from safetensors.numpy import save_file
        import numpy

        with t.temporary_folder() as folder:
            save_file({"x": numpy.ones((1, 1, 8, 784), numpy.float32), "y": numpy.zeros((1, 1, 8), numpy.int64)},
                      folder / "in")
            run = {"model": "mlp", "lr": 0.001, "units": ["layers.*"], "share_memory": share_memory,
                   "input": str(folder / "in"), "warmup": 3, "steps": 10_000_000}
            config = folder / "config.json"
            config.write_text(json.dumps({"mode": "time", "backend": backend, "meet": str(folder / "meet"),
                                          "runs": [run]}))
            victim = random.randrange(size)
            ranks, logs = [], []
            try:
                for rank in range(size):
                    logs.append(folder / f"log.{rank}")
                    with open(logs[-1], "w") as log:
                        ranks.append(subprocess.Popen([str(RANK), str(config), str(rank), str(size)], stdout=log,
                                                      stderr=log, env=t.clean_environment(GLOO_SOCKET_IFNAME="lo")))
                t.wait_until(lambda: all("trains" in log.read_text() for log in logs), 60, "all ranks to train")
                ranks[victim].send_signal(signal.SIGKILL)
                begin = time.monotonic()
                for rank in range(size):
                    code = ranks[rank].wait(60)
                    if rank == victim:
                        continue
                    text = logs[rank].read_text()
                    self.assertNotEqual(code, 0, text)
                    self.assertIn(f"rank {victim}", text)
                self.assertLess(time.monotonic() - begin, 30)
            finally:
                for process in ranks:
                    if process.poll() is None:
                        process.kill()
                    process.wait()

    def test_over_shared_memory(self):
        self.kill_one("shm", 3)

    def test_over_shared_memory_with_gathers(self):
        self.kill_one("shm", 2, share_memory=False)

    def test_over_gloo(self):
        self.kill_one("gloo", 3)


if __name__ == "__main__":
    t.main()
