"""Ranks of a shared-memory group that are killed or stopped at random moments: every survivor ends with
an error that names the rank at fault, in time, and nothing is left behind.

LOCKSTEP_FAULT_SEED repeats a run; LOCKSTEP_LONG_TESTS=1 makes 500 kills of it."""

import os
import random
import signal
import statistics
import time
import unittest

import lockstep_testing as t
from left_behind import LeftBehind
from test_comm_faults import PEER_LOST, SHORT, TIMEOUT, begun, hosted_store, job, stand_still, survivors_name

# What a rank says of one that it lost, or waited for in vain; %d is its number.
ENDED = r"rank %d \(process \d+[^()]*\) has ended"
DID_NOT_COME = r"ranks? [\d, and]*\b%d\b[\d, and]*(?:\(process \d+[^()]*\) )?did not come"
STANDS_STILL = rf"{DID_NOT_COME}|rank %d \(process \d+[^()]*\) (?:came but does not go on|did not call the |has called the )"

SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")


class ShmFaults(unittest.TestCase):
    def setUp(self):
        self.left_behind = LeftBehind()

    def tearDown(self):
        self.left_behind.expect_nothing()

    def survivors_say(self, ranks, victim, kinds, within=20):
        """All ranks but the victim end in time, each with one of the exit codes and its text about the victim."""
        for index, (code, text) in survivors_name(self, ranks, {victim}, set(kinds), within).items():
            self.assertRegex(text, kinds[code].replace("%d", str(victim)), f"rank {index}, exit code {code}")

    def test_killed_rank_is_named_by_all_survivors(self):
        reaction = []
        for number in range(500 if LONG else 6):
            seed = SEED + number
            choose = random.Random(seed)
            size = choose.choice([2, 2, 3, 4])
            victim = choose.randrange(size)
            line, delay = choose.choice([("joined", choose.uniform(0, 0.02)), ("round 3", choose.uniform(0, 0.1)),
                                         ("round 40", choose.uniform(0, 0.01))])
            what = f"seed {seed}: rank {victim} of {size}, {delay:.4f} s after '{line}'"
            with self.subTest(what), hosted_store() as (_, port), job(30, "info", port, size=size, backend="shm") as ranks:
                begun(ranks, line)
                time.sleep(delay)  # The random moment; nothing is waited for.
                ranks[victim].process.kill()
                killed = time.monotonic()
                self.survivors_say(ranks, victim, {PEER_LOST: ENDED})
                reaction.append((time.monotonic() - killed, what))
        longest, where = max(reaction)
        print(f"seeds {SEED} to {SEED + len(reaction) - 1}: all survivors had ended after "
              f"{statistics.median(seconds for seconds, _ in reaction):.3f} s (median), {longest:.3f} s (longest: "
              f"{where})", flush=True)

    def test_a_rank_killed_while_the_group_forms(self):
        for number in range(60 if LONG else 2):
            seed = SEED + 1000 + number
            choose = random.Random(seed)
            with self.subTest(f"seed {seed}"), hosted_store() as (_, port), job(
                    30, "info", port, size=3, backend="shm", TEST_JOIN_SECONDS=3) as ranks:
                time.sleep(choose.uniform(0, 0.6))  # The random moment; nothing is waited for.
                victim = choose.randrange(3)
                ranks[victim].process.kill()
                # Before the group stands nobody knows the process that a rank is: the time-out ends the wait.
                # Who waits for rank 0, which has given up, names what it gave up over.
                self.survivors_say(ranks, victim, {PEER_LOST: f"{ENDED}|{DID_NOT_COME}", TIMEOUT: DID_NOT_COME}, within=30)

    def test_all_killed_at_once_leave_nothing(self):
        for number in range(40 if LONG else 2):
            seed = SEED + 2000 + number
            choose = random.Random(seed)
            with self.subTest(f"seed {seed}"), hosted_store() as (_, port), job(30, "info", port, backend="shm") as ranks:
                time.sleep(choose.uniform(0, 1.0))  # The random moment; nothing is waited for.
                for rank in ranks:
                    rank.process.kill()
                for rank in ranks:
                    rank.process.wait(20)

    def test_stopped_rank_times_out_and_is_named(self):
        choose = random.Random(SEED + 3000)
        victim = choose.randrange(4)
        with hosted_store() as (_, port), job(SHORT, "info", port, backend="shm") as ranks:
            begun(ranks, "round 3")
            ranks[victim].process.send_signal(signal.SIGSTOP)
            self.survivors_say(ranks, victim, {TIMEOUT: STANDS_STILL})
            ranks[victim].process.send_signal(signal.SIGCONT)
            code, text = ranks[victim].end(20)
            self.assertIn(code, {TIMEOUT, PEER_LOST}, text)

    def test_ranks_that_all_stood_still_were_late_for_nobody(self):
        with hosted_store() as (_, port), job(2, "info", port, backend="shm") as ranks:
            begun(ranks, "round 3")
            stand_still(ranks, 2.5)
            begun(ranks, "round 3")  # None has ended.


if __name__ == "__main__":
    print(f"LOCKSTEP_FAULT_SEED={SEED}", flush=True)
    t.main()
