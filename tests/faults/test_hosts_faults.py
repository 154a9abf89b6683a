"""Ranks on two hosts that are killed or stopped at random moments, and whole hosts that are lost: every
survivor on either host ends with an error that names who is at fault, in time, and nothing is left behind.

The hosts are network namespaces where these are permitted, else declared by LOCKSTEP_HOST_ID.
LOCKSTEP_FAULT_SEED repeats a run; LOCKSTEP_LONG_TESTS=1 makes it a long one."""

import contextlib
import os
import random
import signal
import statistics
import time
import unittest

import hosts_testing as hosts
import lockstep_testing as t
from left_behind import LeftBehind
from test_comm_faults import PEER_LOST, RANK, SHORT, TIMEOUT, Rank, begun, hosted_store, stand_still, survivors_name

SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
WHY_NO_HOSTS = hosts.why_no_hosts()


@contextlib.contextmanager
def started(commands, seconds):
    """One rank for each (command prefix, environment)."""
    ranks = []
    try:
        for prefix, env in commands:
            ranks.append(Rank([*prefix, RANK, "loop", "env://", seconds], env))
        yield ranks
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()
            rank.reader.join(10)
            rank.process.stdout.close()


@contextlib.contextmanager
def declared_hosts(placement, seconds=30, join_seconds=60):
    """A job on hosts declared by hand; `placement[r]` names the one of rank r."""
    with hosted_store() as (_, port):
        commands = []
        for rank, host in enumerate(placement):
            commands.append(([], t.clean_environment(
                RANK=rank, WORLD_SIZE=len(placement), LOCKSTEP_HOST_ID=host, TEST_BACKEND="auto", TEST_JOIN_SECONDS=join_seconds,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")))
        with started(commands, seconds) as ranks:
            yield ranks


@contextlib.contextmanager
def joined_hosts(pair, placement, seconds=30, join_seconds=60):
    """A job on the two hosts of hosts_testing; rank 0, on the first of them, holds the store."""
    commands = []
    for rank, host in enumerate(placement):
        local = [r for r, other in enumerate(placement) if other == host]
        env = t.clean_environment(RANK=rank, WORLD_SIZE=len(placement), LOCAL_RANK=local.index(rank),
                                  LOCAL_WORLD_SIZE=len(local), GROUP_RANK=host, GROUP_WORLD_SIZE=2,
                                  TEST_BACKEND="auto", TEST_JOIN_SECONDS=join_seconds,
                                  MASTER_ADDR=pair[0].address, MASTER_PORT=29500)
        commands.append((pair[host].command(), env))
    with started(commands, seconds) as ranks:
        yield ranks


class HostsFaults(unittest.TestCase):
    def setUp(self):
        self.left_behind = LeftBehind()

    def tearDown(self):
        self.left_behind.expect_nothing()

    def moment(self, choose):
        return choose.choice([("joined", choose.uniform(0, 0.05)), ("round 3", choose.uniform(0, 0.2)),
                              ("round 12", choose.uniform(0, 0.1))])

    def test_a_killed_rank_is_named_on_all_hosts(self):
        reaction = []
        for number in range(100 if LONG else 4):
            seed = SEED + number
            choose = random.Random(seed)
            placement = choose.choice(["aabb", "aabb", "aaab", "abab", "aab", "aabbc"])
            victim = choose.randrange(len(placement))
            line, delay = self.moment(choose)
            what = f"seed {seed}: rank {victim} of {placement}, {delay:.4f} s after '{line}'"
            print(what, flush=True)
            with self.subTest(what), declared_hosts(placement) as ranks:
                begun(ranks, line)
                time.sleep(delay)  # The random moment; nothing is waited for.
                ranks[victim].process.kill()
                killed = time.monotonic()
                survivors_name(self, ranks, {victim}, {PEER_LOST})
                reaction.append(time.monotonic() - killed)
        print(f"all survivors had ended after {statistics.median(reaction):.2f} s (median), {max(reaction):.2f} s (longest)",
              flush=True)

    def test_a_stopped_rank_times_out_and_is_named_on_all_hosts(self):
        choose = random.Random(SEED + 3000)
        for victim in choose.sample(range(4), 2 if LONG else 1):
            with self.subTest(f"seed {SEED + 3000}: rank {victim}"), declared_hosts("aabb", SHORT) as ranks:
                begun(ranks, "round 3")
                ranks[victim].process.send_signal(signal.SIGSTOP)
                # Time-outs of a rank and of one that waits for it may end at once: the call of the
                # latter then names the former.
                survivors_name(self, ranks, {victim}, {TIMEOUT, PEER_LOST}, 30, or_who_waits_for_it=True)
                ranks[victim].process.send_signal(signal.SIGCONT)
                code, text = ranks[victim].end(20)
                self.assertIn(code, {TIMEOUT, PEER_LOST}, text)

    def test_ranks_that_all_stood_still_were_late_for_nobody(self):
        """What came while a leader stood still lay unread in its socket, and it took its peer for late."""
        with declared_hosts("aabb", 2) as ranks:
            begun(ranks, "round 3")
            for _ in range(3 if LONG else 1):
                stand_still(ranks, 2.5)
                begun(ranks, "round 3")  # None has ended.

    def test_ranks_killed_while_the_group_forms(self):
        for number in range(40 if LONG else 2):
            seed = SEED + 1000 + number
            choose = random.Random(seed)
            with self.subTest(f"seed {seed}"), declared_hosts("aabb", join_seconds=3) as ranks:
                time.sleep(choose.uniform(0, 0.6))  # The random moment; nothing is waited for.
                victim = choose.randrange(4)
                ranks[victim].process.kill()
                for index in set(range(4)) - {victim}:
                    code, text = ranks[index].end(40)
                    self.assertIn(code, {1, PEER_LOST, TIMEOUT}, f"rank {index}: {text}")

    @unittest.skipIf(WHY_NO_HOSTS, WHY_NO_HOSTS)
    def test_a_rank_killed_in_another_network_is_named(self):
        for number in range(30 if LONG else 2):
            seed = SEED + 5000 + number
            choose = random.Random(seed)
            victim = choose.randrange(4)
            line, delay = self.moment(choose)
            what = f"seed {seed}: rank {victim} of two networks, {delay:.4f} s after '{line}'"
            print(what, flush=True)
            with self.subTest(what), hosts.two_hosts() as pair, joined_hosts(pair, [0, 0, 1, 1]) as ranks:
                begun(ranks, line)
                time.sleep(delay)  # The random moment; nothing is waited for.
                os.kill(hosts.only_child(ranks[victim].process.pid), signal.SIGKILL)
                survivors_name(self, ranks, {victim}, {PEER_LOST})

    @unittest.skipIf(WHY_NO_HOSTS, WHY_NO_HOSTS)
    def test_a_host_whose_processes_all_end_is_named(self):
        for number in range(20 if LONG else 2):
            seed = SEED + 6000 + number
            choose = random.Random(seed)
            lost = number % 2  # With the first host the store goes, too.
            line, delay = self.moment(choose)
            what = f"seed {seed}: host {lost}, {delay:.4f} s after '{line}'"
            print(what, flush=True)
            with self.subTest(what), hosts.two_hosts() as pair, joined_hosts(pair, [0, 0, 1, 1]) as ranks:
                begun(ranks, line)
                time.sleep(delay)  # The random moment; nothing is waited for.
                pair[lost].kill_processes()
                survivors_name(self, ranks, {0, 1} if lost == 0 else {2, 3}, {PEER_LOST})

    @unittest.skipIf(WHY_NO_HOSTS, WHY_NO_HOSTS)
    def test_a_host_that_is_cut_off_runs_into_the_time_out(self):
        lost_hosts = (1, 0) if LONG else [random.Random(SEED).randrange(2)]
        for lost in lost_hosts:  # With the first host the store goes, too, and answers nothing.
            # Requests to the store keep the time-out of joining.
            with self.subTest(lost), hosts.two_hosts() as pair, joined_hosts(pair, [0, 0, 1, 1], SHORT, 20) as ranks:
                begun(ranks, "round 3")
                pair[lost].kill()
                survivors_name(self, ranks, {0, 1} if lost == 0 else {2, 3}, {TIMEOUT, PEER_LOST}, 60,
                                    or_who_waits_for_it=True)


if __name__ == "__main__":
    print(f"LOCKSTEP_FAULT_SEED={SEED}", flush=True)
    t.main()
