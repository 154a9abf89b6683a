"""Processes form one World after the other over one store. Members die at random, and ranks change. Nothing of an
earlier generation is taken for its own, and nothing of it is left: descriptors, threads, mappings, keys."""

import contextlib
import json
import os
import random
import subprocess
import unittest

import hosts_testing
import lockstep_testing as t
from left_behind import LeftBehind

PROGRAM = t.BUILD_DIR / "tests" / "lockstep_generations"
SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = bool(os.environ.get("LOCKSTEP_LONG_TESTS"))
# malloc keeps arenas and LibTorch makes pools when they are first asked for, which may be late.
SOME_MAPPINGS = 40


class Here:
    """The machine itself, as a host of hosts_testing."""

    address = "127.0.0.1"

    def command(self, *words):
        return [str(word) for word in words]


@contextlib.contextmanager
def hosted_store(host):
    process = subprocess.Popen(host.command(PROGRAM, "store", host.address), stdout=subprocess.PIPE, stdin=subprocess.PIPE,
                               text=True, env=t.clean_environment())
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(20)


class Generations(unittest.TestCase):
    def check(self, backend, count, hosts):
        """`count` generations of a permanent member for each entry of `hosts`."""
        print(f"{backend}: LOCKSTEP_FAULT_SEED={SEED}", flush=True)
        with hosted_store(hosts[0]) as port:
            members = [subprocess.Popen(host.command(PROGRAM, "member", number, len(hosts), hosts[0].address, port, backend,
                                                     count, SEED),
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
                                        env=t.clean_environment(OMP_NUM_THREADS="1"))
                       for number, host in enumerate(hosts)]
            try:
                told = [member.communicate(timeout=1200) for member in members]
            finally:
                for member in members:
                    member.kill()
                    member.wait(20)
        weights = []
        self.assertEqual([member.returncode for member in members], [0] * len(members), told)
        for output, _ in told:
            result = json.loads(output)
            self.assertEqual(result["seen"], result["deaths"], result)
            before, after = result["before"], result["after"]
            self.assertEqual(after["descriptors"], before["descriptors"], result)
            self.assertLessEqual(after["threads"], before["threads"], result)
            self.assertLessEqual(after["mappings"], before["mappings"] + SOME_MAPPINGS, result)
            weights.append(result["weights"])
            # Those of the last generation are left, whichever members it had.
            self.assertLess(after["keys"], 40 * (len(hosts) + 1), result)
        self.assertTrue(all(each == weights[0] for each in weights), weights)
        if count >= 100:
            self.assertGreater(result["deaths"], 0)

    def setUp(self):
        self.left = LeftBehind()

    def tearDown(self):
        self.left.expect_nothing()

    def test_over_shared_memory(self):
        self.check("shm", 1000 if LONG else 150, [Here(), Here()])

    def test_over_gloo(self):
        self.check("gloo", 200 if LONG else 40, [Here(), Here()])

    def test_over_hosts(self):
        why_not = hosts_testing.why_no_hosts()
        if why_not:
            self.skipTest(why_not)
        with hosts_testing.two_hosts() as hosts:
            self.check("hierarchical", 200 if LONG else 30, [hosts[0], hosts[0], hosts[1], hosts[1]])


if __name__ == "__main__":
    t.main()
