"""The backend mpi against Gloo's and ATen's results, at 1, 2, 3, 4 and 7 ranks of mpirun.

LOCKSTEP_TEST_SEED repeats a run."""

import os
import random
import unittest

import lockstep_testing as t
import mpi_testing

PROGRAM = t.BUILD_DIR / "tests" / "lockstep_mpi_test"
SEED = os.environ.get("LOCKSTEP_TEST_SEED") or str(random.randrange(1 << 30))


class MpiBackend(unittest.TestCase):
    def check(self, ranks, options=()):
        code, out, err = mpi_testing.mpirun(ranks, PROGRAM, "--gtest_brief=1", options=options,
                                            env={"LOCKSTEP_TEST_SEED": SEED}, timeout=300)
        self.assertEqual(code, 0, f"{ranks} ranks\n{out[-6000:]}\n{err[-3000:]}")
        self.assertIn("PASSED", out)

    def test_one_rank(self):
        self.check(1)

    def test_two_ranks(self):
        self.check(2)

    def test_three_ranks(self):
        self.check(3)

    def test_four_ranks(self):
        self.check(4)

    def test_seven_ranks(self):
        self.check(7)

    def test_over_tcp_as_between_hosts(self):
        # Open MPI's transport between hosts, where what is sent needs its progress to leave.
        self.check(3, options=("--mca", "btl", "tcp,self", "--mca", "pml", "ob1"))


if __name__ == "__main__":
    reason = mpi_testing.missing() or (None if PROGRAM.exists() else "Lockstep was built without MPI")
    if reason:
        mpi_testing.skip_all(reason)
    print(f"LOCKSTEP_TEST_SEED={SEED}", flush=True)
    t.main()
