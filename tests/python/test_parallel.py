"""What PyTorch builds on groups, over "lockstep" against Gloo: FSDP2, ZeRO, meshes, functional collectives, Join.

PyTorch's own tests of these do not come with the wheel: torch/testing/_internal has their tools only (common_fsdp,
common_dtensor). So these are written here.
"""

import unittest

import lockstep_testing as t
import wheel_testing as w

w.require_tools()

import torch  # noqa: E402

RANKS = 4


class Parallel(unittest.TestCase):
    def test_it_is_as_over_gloo(self):
        with t.temporary_folder() as folder:
            for backend in ("lockstep", "gloo"):
                w.run_ranks(RANKS, w.HERE / "parallel_rank.py", backend, folder / backend)
            for rank in range(RANKS):
                ours, theirs = (torch.load(folder / f"{backend}.{rank}") for backend in ("lockstep", "gloo"))
                self.assertEqual(ours.keys(), theirs.keys())
                self.assertGreater(len(ours), 15)
                for name, value in theirs.items():
                    with self.subTest(name, rank=rank):
                        # Sums of four ranks are added in another order: some last bits differ.
                        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    t.main()
