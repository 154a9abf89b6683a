"""`lockstep run` on several hosts that join, leave, fail and vanish. Each launcher stands for a host.

Faults that users of torchrun report, and the tests that Lockstep has none of them (ElasticAgent is lockstep/elastic/agent_test.cpp):
  pytorch#111646, a lost heartbeat restarts nothing       ElasticAgent.ALostHeartbeatBringsANewGenerationWithinTheKeepAlive,
                                                          OnFourHosts
  #67742, #150916, all end with the store's host          ElasticAgent.TheStoreMovesWhenItsHostIsKilled,
                                                          OverEtcd.test_the_first_host_and_a_member_of_etcd_are_lost,
                                                          test_who_loses_the_embedded_registry_keeps_its_workers_until_they_end
  #182221, a survivor that becomes rank 0 crashes         ElasticAgent.ASurvivorBecomesRankZero
  #147064, a fast rejoin is refused, or not counted       ElasticAgent.AFastRejoinIsTakenAndCountsNothing,
                                                          ElasticAgent.ARejoinDoesNotGoAroundMaxRestarts
  #123678, a shutdown breaks the next meeting             ElasticAgent.AHostThatLeavesDoesNotDisturbTheNextGeneration
  #135712, restarts counted by worker, ids of before      ElasticAgent.AFailureOfSeveralWorkersCountsOnceForTheJob,
                                                          ElasticAgent.AnEndedJobOfTheSameRunIdIsNotOurs
  #68258, #119856, 30 s before KILL whatever was asked    test_restarts.py: test_the_shutdown_timeout_counts_after_a_signal,
                                                          test_run_faults.py: test_the_grace_is_settable
  #154849, USR1 and USR2 are lost                         test_restarts.py: test_usr1_and_usr2_reach_the_workers_and_end_nothing
  #67615, #182223, ranks move, host 0 without rank 0      ElasticAgent.RanksStayWhenHostsComeAndGo,
                                                          ElasticAgent.NodeRankZeroHasRankZero
  #118891, the store's host ends after 300 s              ElasticAgent.AFirstHostThatIsDoneWaitsForTheOthersHoweverLong
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import unittest
import urllib.request

import hosts_testing
import lockstep_testing as t
from run_testing import Launched, processes_with, running

SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = bool(os.environ.get("LOCKSTEP_LONG_TESTS"))
SNAPSHOTS = t.BUILD_DIR / "examples/002_ddp_series/multigpu_torchrun"

# A worker that tells what it is, and goes on until the folder holds `end`. With `fail` there it takes that away and fails.
WORKER = """
echo "$WORLD_SIZE $RANK $GROUP_RANK $TORCHELASTIC_RESTART_COUNT $NAME" > $OUT/tmp.$NAME.$$; mv $OUT/tmp.$NAME.$$ $OUT/at.$WORLD_SIZE.$RANK.$TORCHELASTIC_RESTART_COUNT
until [ -e $OUT/end ]; do
  [ -e $OUT/fail.$NAME ] && rm $OUT/fail.$NAME && echo "$NAME fails" >&2 && exit 7
  sleep 0.02
done
"""


def setUpModule():
    print(f"LOCKSTEP_FAULT_SEED={SEED}", flush=True)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Job(contextlib.ExitStack):
    """Launchers of one job, by name."""

    def __init__(self, *flags, folder, backend="c10d", endpoint=None):
        super().__init__()
        self.folder, self.port = folder, free_port()
        self.flags = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint or f"127.0.0.1:{self.port}", "--rdzv-id", "job",
                      *flags]
        self.hosts = {}

    def add(self, name, *more, program=("sh", "-c", WORKER), cwd=None):
        self.hosts[name] = self.enter_context(Launched(*self.flags, *more, *program, cwd=cwd,
                                                       env={"OUT": str(self.folder), "NAME": name}))
        return self.hosts[name]

    def generation(self, size, restarts=0, timeout=60):
        """Waits until ranks of a generation of that many have started. By rank: the host's number and name."""
        files = [self.folder / f"at.{size}.{rank}.{restarts}" for rank in range(size)]
        t.wait_until(lambda: all(file.exists() for file in files), timeout, f"{size} ranks after {restarts} restarts")
        found = {int(words[1]): (int(words[2]), words[4]) for words in (file.read_text().split() for file in files)}
        for file in files:
            file.unlink()
        return found

    def end(self, timeout=60):
        """Lets the workers end. By name: exit code and standard error."""
        (self.folder / "end").touch()
        return self.ends(timeout)

    def ends(self, timeout=60):
        told = {}
        for name, host in self.hosts.items():
            code, _, err = host.end(timeout)
            host.nothing_left()
            told[name] = (code, err)
        return told


class Elastic(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(t.temporary_folder())

    def job(self, *flags, **more):
        return self.enterContext(Job(*flags, folder=self.folder, **more))

    def expect_success(self, ends):
        for name, (code, err) in ends.items():
            self.assertEqual(code, 0, f"{name}: {err}")

    def test_hosts_join_late_and_leave(self):
        job = self.job("--nnodes", "1:3", "--nproc-per-node", 2)
        job.add("a")
        self.assertEqual(set(job.generation(2).values()), {(0, "a")})
        job.add("b")
        # Hosts keep their order. A change of members counts as no restart.
        self.assertEqual(job.generation(4), {0: (0, "a"), 1: (0, "a"), 2: (1, "b"), 3: (1, "b")})
        left = job.hosts.pop("b")
        left.send(signal.SIGTERM)
        self.assertEqual(left.end(60)[0], 128 + signal.SIGTERM)
        self.assertEqual(set(job.generation(2).values()), {(0, "a")})
        self.expect_success(job.end())

    def test_a_failure_restarts_all_hosts_and_is_counted_once(self):
        job = self.job("--nnodes", 2, "--max-restarts", 2)
        job.add("a"), job.add("b")
        before = job.generation(2)
        (self.folder / "fail.b").touch()
        self.assertEqual(job.generation(2, restarts=1), before)
        (self.folder / "fail.a").touch()
        self.assertEqual(job.generation(2, restarts=2), before)
        (self.folder / "fail.b").touch()
        for name, (code, err) in job.ends().items():
            self.assertEqual(code, 7, f"{name}: {err}")
            self.assertIn("b fails", err)

    def test_what_cannot_succeed_is_not_tried_again(self):
        job = self.job("--nnodes", 2, "--max-restarts", 2)
        job.add("a", program=("sh", "-c", "exit 2"))
        job.add("b")
        for name, (code, err) in job.ends().items():
            self.assertEqual(code, 2, f"{name}: {err}")

    def test_a_host_that_vanishes_is_replaced_by_one_that_stands_by(self):
        job = self.job("--nnodes", "1:2", "--keep-alive", 1)
        job.add("a")
        job.generation(1)
        job.add("b")
        job.generation(2)
        job.add("c")
        lost = job.hosts.pop("b")
        os.killpg(lost.process.pid, signal.SIGKILL)
        began = time.monotonic()
        self.assertEqual(job.generation(2), {0: (0, "a"), 1: (1, "c")})
        self.assertLess(time.monotonic() - began, 30)
        lost.nothing_left()
        self.expect_success(job.end())

    def test_an_interrupted_host_of_a_fixed_number_ends_all(self):
        job = self.job("--nnodes", 2)
        job.add("a"), job.add("b")
        job.generation(2)
        job.hosts["b"].send(signal.SIGINT)
        ends = job.ends()
        self.assertEqual(ends["b"][0], 128 + signal.SIGINT, ends["b"][1])
        self.assertGreater(ends["a"][0], 128, ends["a"][1])

    def test_a_host_that_vanishes_ends_a_static_job_without_restarts(self):
        flags = ("--nnodes", 2, "--keep-alive", 1)
        job = Job(*flags, folder=self.folder, backend="static")
        self.enterContext(job)
        job.add("a", "--node-rank", 0), job.add("b", "--node-rank", 1)
        self.assertEqual(job.generation(2), {0: (0, "a"), 1: (1, "b")})
        lost = job.hosts.pop("b")
        os.killpg(lost.process.pid, signal.SIGKILL)
        code, err = job.ends()["a"]
        self.assertEqual(code, 1, err)
        self.assertIn("a host is lost", err)

    def test_two_hosts_with_one_number_are_refused(self):
        job = self.enterContext(Job("--nnodes", 3, "--keep-alive", 1, folder=self.folder, backend="static"))
        for name, number in (("a", 0), ("b", 1), ("c", 1)):
            job.add(name, "--node-rank", number)
        for name, (code, err) in job.ends().items():
            self.assertEqual(code, 2, f"{name}: {err}")
            for twin in "bc":
                self.assertIn(f"-{job.hosts[twin].process.pid}-", err)

    def test_who_loses_the_embedded_registry_keeps_its_workers_until_they_end(self):
        job = self.job("--nnodes", 2, "--keep-alive", 1)
        serves = job.add("a")
        t.wait_until(lambda: self.listens(job), 30, "the registry")
        job.add("b")
        job.generation(2)
        job.hosts.pop("a")
        os.killpg(serves.process.pid, signal.SIGKILL)
        serves.nothing_left()
        # Longer than it takes to see that. Its worker tells of a failure in a generation that nobody can follow.
        (self.folder / "fail.b").touch()
        code, err = job.ends()["b"]
        self.assertEqual(code, 7, err)
        self.assertIn("b fails", err)

    def test_hosts_prove_that_they_know_the_token(self):
        token, other = self.folder / "token", self.folder / "other"
        for file, text in ((token, "a token of some length"), (other, "another of that length")):
            file.touch(0o600)
            file.write_text(text)
        job = self.job("--nnodes", "1:2")
        job.add("a", "--token-file", token)
        job.generation(1)
        for flags in ((), ("--token-file", other)):
            stranger = job.add("stranger", *flags)
            code, _, err = stranger.end(60)
            self.assertEqual(code, 1, err)
            self.assertIn("--token-file", err)
            job.hosts.pop("stranger")
        job.add("b", "--token-file", token)
        job.generation(2)
        self.expect_success(job.end())

    def test_training_goes_on_from_its_snapshot(self):
        chance = random.Random(SEED)
        job = self.job("--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 3)
        for name in "ab":
            job.add(name, program=(SNAPSHOTS, 100, 1), cwd=self.folder)
        t.wait_until((self.folder / "snapshot.safetensors").exists, 60, "the first snapshot")
        t.wait_until(lambda: self.ranks(job), 30, "the ranks")
        os.kill(chance.choice(self.ranks(job)), signal.SIGKILL)
        ends = job.ends(120)
        self.expect_success(ends)
        self.assertTrue(any("1 of 3" in err for _, err in ends.values()), ends)

    @staticmethod
    def listens(job):
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", job.port)) == 0

    @staticmethod
    def ranks(job):
        return [pid for host in job.hosts.values() for pid in running(host.mark, SNAPSHOTS)]


@unittest.skipIf(hosts_testing.why_no_hosts(), hosts_testing.why_no_hosts())
class OnFourHosts(unittest.TestCase):
    def test_hosts_that_all_take_themselves_for_host_0_are_told_apart(self):
        with hosts_testing.bridged_hosts(2) as hosts:
            job = [subprocess.Popen(host.command(t.LOCKSTEP, "run", "--nnodes", 2, "--master-addr", hosts[0].address, "true"),
                                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                    env=t.clean_environment()) for host in hosts]
            try:
                for process in job:
                    err = process.communicate(timeout=30)[1]
                    self.assertEqual(process.returncode, 2, err)
                    self.assertIn("both are host 0", err)
            finally:
                for process in job:
                    process.kill()
                    process.wait()

    def test_a_host_that_loses_its_power_is_noticed_and_the_others_go_on(self):
        with t.temporary_folder() as folder, hosts_testing.bridged_hosts(4) as hosts:
            said = [open(folder / f"said.{number}", "w+") for number in range(4)]
            job = [subprocess.Popen(
                host.command(t.LOCKSTEP, "run", "--nnodes", "2:4", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                             f"{hosts[0].address}:29400", "--rdzv-id", "job", "sh", "-c", WORKER),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said[number],
                env=t.clean_environment(OUT=folder, NAME=number)) for number, host in enumerate(hosts)]
            try:
                generation = lambda size: all((folder / f"at.{size}.{rank}.0").exists() for rank in range(size))
                t.wait_until(lambda: generation(4), 60, "four hosts")
                hosts[2].kill()
                began = time.monotonic()
                t.wait_until(lambda: generation(3), 60, "three hosts")
                print(f"from the loss to the next generation: {time.monotonic() - began:.1f} s", flush=True)
                (folder / "end").touch()
                for number in (0, 1, 3):
                    self.assertEqual(job[number].wait(60), 0, (folder / f"said.{number}").read_text())
            finally:
                for process, file in zip(job, said):
                    process.kill()
                    process.wait()
                    file.close()


class Etcd(contextlib.ExitStack):
    """etcd's members as processes, in a folder that goes with them."""

    def __init__(self, members=3):
        super().__init__()
        folder = self.enter_context(t.temporary_folder())
        self.clients = [f"http://127.0.0.1:{free_port()}" for _ in range(members)]
        peers = [f"http://127.0.0.1:{free_port()}" for _ in range(members)]
        cluster = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
        self.commands = [
            ["etcd", "--name", f"m{i}", "--data-dir", folder / f"m{i}", "--listen-client-urls", client, "--advertise-client-urls",
             client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster]
            for i, (client, peer) in enumerate(zip(self.clients, peers))]
        self.members = [None] * members
        for i in range(members):
            self.start(i)
            self.callback(self.kill, i)

    def start(self, i):
        self.members[i] = subprocess.Popen(self.commands[i], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                           stderr=subprocess.DEVNULL)

    @staticmethod
    def is_there():
        return bool(shutil.which("etcd"))

    def kill(self, i):
        self.members[i].kill()
        self.members[i].wait(20)

    def leases_kept(self):
        """By member, as it says itself: how often it has prolonged a lease. Without those that do not answer."""
        kept = {}
        for client in self.clients:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{client}/metrics", timeout=1) as answer:
                found = re.search(r"^etcd_debugging_lease_renewed_total (\S+)", answer.read().decode(), re.MULTILINE)
                kept[client] = int(float(found[1]))
        return kept

    @property
    def endpoint(self):
        return ",".join(client.removeprefix("http://") for client in self.clients)


@unittest.skipUnless(Etcd.is_there(), "etcd is not installed")
class OverEtcd(Elastic):
    """The same, where any host may be lost."""

    def setUp(self):
        super().setUp()
        self.etcd = self.enterContext(Etcd())

    def job(self, *flags, **more):
        return super().job(*flags, backend="etcd", endpoint=self.etcd.endpoint, **more)

    test_who_loses_the_embedded_registry_keeps_its_workers_until_they_end = None
    test_a_host_that_vanishes_ends_a_static_job_without_restarts = None
    test_two_hosts_with_one_number_are_refused = None
    test_hosts_prove_that_they_know_the_token = None
    test_what_cannot_succeed_is_not_tried_again = None
    test_training_goes_on_from_its_snapshot = None
    if not LONG:
        test_a_host_that_vanishes_is_replaced_by_one_that_stands_by = None
        test_an_interrupted_host_of_a_fixed_number_ends_all = None

    def test_the_first_host_and_a_member_of_etcd_are_lost(self):
        job = self.job("--nnodes", "1:2", "--keep-alive", 1)
        job.add("a")
        job.generation(1)
        job.add("b")
        job.generation(2)
        self.etcd.kill(random.Random(SEED).randrange(3))
        lost = job.hosts.pop("a")
        os.killpg(lost.process.pid, signal.SIGKILL)
        lost.nothing_left()
        self.assertEqual(job.generation(1), {0: (0, "b")})
        self.expect_success(job.end())

    def test_hosts_wait_for_an_etcd_that_is_away_and_go_on(self):
        job = self.job("--nnodes", 2, "--keep-alive", 1)
        job.add("a"), job.add("b")
        before = job.generation(2)
        for i in range(3):
            self.etcd.kill(i)
        # After five of --keep-alive nobody knows whether others have gone on.
        t.wait_until(lambda: not any(self.workers(host) for host in job.hosts.values()), 60, "the ranks' end")
        for i in range(3):
            self.etcd.start(i)
        self.assertEqual(job.generation(2), before)
        self.expect_success(job.end())

    @staticmethod
    def workers(host):
        return [pid for pid, line in processes_with(host.mark) if line.startswith(b"sh\0")]

    def test_all_hosts_are_killed_and_the_job_is_started_again(self):
        job = self.job("--nnodes", 2, "--keep-alive", 1)
        job.add("a"), job.add("b")
        job.generation(2)
        for name in "ab":
            lost = job.hosts.pop(name)
            os.killpg(lost.process.pid, signal.SIGKILL)
            lost.nothing_left()
        began = time.monotonic()
        job.add("c"), job.add("d")
        self.assertEqual({name for _, name in job.generation(2).values()}, {"c", "d"})
        print(f"from the second start to its ranks: {time.monotonic() - began:.1f} s", flush=True)
        # The leases of etcd (2 s), five of --keep-alive, and the grace of ranks that are cut off.
        self.assertLess(time.monotonic() - began, 20)
        self.expect_success(job.end())


if __name__ == "__main__":
    t.main()
