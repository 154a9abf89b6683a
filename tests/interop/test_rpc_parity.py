"""Distributed autograd and optimizer give the losses, gradients and weights of Python's, to the last bit."""

import pathlib
import subprocess
import unittest

import lockstep_testing as testing
import torch_forks
from parity_testing import require_linked_torch

require_linked_torch()

from safetensors.torch import load_file  # noqa: E402

HERE = pathlib.Path(__file__).parent


class RpcParity(unittest.TestCase):
    def run_python(self, folder, output):
        env = testing.clean_environment(TP_SOCKET_IFNAME="lo")
        python = torch_forks.python("torch.distributed.rpc", "torch.distributed.optim")
        workers = [subprocess.Popen([*python, str(HERE / "rpc_parity_worker.py"), str(rank), str(folder / "store"), str(output)],
                                    env=env) for rank in range(3)]
        try:
            self.assertEqual([worker.wait(timeout=120) for worker in workers], [0, 0, 0])
        finally:
            for worker in workers:
                worker.kill()

    def test_results_are_pythons(self):
        with testing.temporary_folder() as folder:
            ours, pythons = folder / "ours", folder / "pythons"
            testing.run(testing.LOCKSTEP, "run", "--nproc-per-node", 3, testing.BUILD_DIR / "tests" / "lockstep_rpc_parity", ours)
            self.run_python(folder, pythons)
            ours, pythons = load_file(ours), load_file(pythons)
            self.assertEqual(sorted(ours), sorted(pythons))
            self.assertEqual([name for name in sorted(ours) if not ours[name].equal(pythons[name])], [])


if __name__ == "__main__":
    testing.main()
