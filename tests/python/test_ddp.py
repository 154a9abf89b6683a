"""Python's DDP over "lockstep" against Gloo."""

import unittest

import lockstep_testing as t
import wheel_testing as w

w.require_tools()

import torch  # noqa: E402


class Ddp(unittest.TestCase):
    def trained(self, folder, backend):
        results = w.run_ranks(2, w.HERE / "ddp_rank.py", backend, folder / backend)
        return [result.stdout for result in results], [torch.load(folder / f"{backend}.{rank}") for rank in (0, 1)]

    def test_hosts_choose_alike(self):
        """One machine divided into hosts by LOCKSTEP_HOST_ID."""
        with t.temporary_folder() as folder:
            for hosts, expected in ((("a", "a", "b"), "hierarchical|3 ranks on 2 hosts\n"),
                                    (("a", "b"), "gloo|2 ranks on 2 hosts\n")):
                results = w.run_ranks(len(hosts), w.HERE / "ddp_rank.py", "lockstep", folder / "weights",
                                      each=[{"LOCKSTEP_HOST_ID": host} for host in hosts])
                self.assertEqual([result.stdout for result in results], [expected] * len(hosts))
                weights = [torch.load(folder / f"weights.{rank}") for rank in range(len(hosts))]
                for name in weights[0]:
                    same = all(torch.equal(weights[0][name], other[name]) for other in weights[1:])
                    self.assertEqual(same, name != "losses", name)

    def test_buckets_lie_in_memory_that_the_ranks_share(self):
        """Where the variable by which c10d allows it is set; it is off by default."""
        for backend, allowed, shared in (("lockstep", 0, True), ("lockstep", 1, False), ("gloo", 0, False)):
            for result in w.run_ranks(2, w.HERE / "buckets_rank.py", backend, DDP_DISABLE_COMM_MEM=allowed):
                self.assertEqual(["memfd:" in line for line in result.stdout.splitlines()], [shared] * 3, result.stdout)

    def test_two_ranks_have_gloos_bits(self):
        with t.temporary_folder() as folder:
            said, ours = self.trained(folder, "lockstep")
            _, theirs = self.trained(folder, "gloo")
        self.assertEqual(said, ["shm|all 2 ranks share one host\n"] * 2)
        for rank in (0, 1):
            self.assertEqual(ours[rank].keys(), theirs[rank].keys())
            for name, value in theirs[rank].items():
                self.assertTrue(torch.equal(ours[rank][name], value), name)
        self.assertFalse(torch.equal(ours[0]["losses"], ours[1]["losses"]))
        self.assertLess(float(ours[0]["losses"][-1]), float(ours[0]["losses"][0]))


if __name__ == "__main__":
    t.main()
