"""Ranks of a job on several hosts live on when a rank or a whole host is lost, and take in a host that comes.

The hosts are declared by LOCKSTEP_HOST_ID, or network namespaces where a host vanishes."""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import time
import unittest

import hosts_testing
import lockstep_testing as t
from left_behind import LeftBehind
from run_testing import alive
from test_recovery import last_line

RANK = t.BUILD_DIR / "tests" / "lockstep_recovery_rank"
SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = bool(os.environ.get("LOCKSTEP_LONG_TESTS"))
BATCH = 4  # Of a rank of that program.


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Host:
    """The launcher of a host, and what its ranks write into a folder of their own."""

    def __init__(self, number, folder, nproc, flags, program, namespace, timeout):
        self.folder = folder / f"host-{number}"
        self.folder.mkdir()
        self.namespace = namespace
        words = [t.LOCKSTEP, "run", "--nproc-per-node", nproc, *flags, *program(self.folder)]
        env = t.clean_environment(LOCKSTEP_TIMEOUT=timeout, **({} if namespace else {"LOCKSTEP_HOST_ID": f"host{number}"}))
        with open(self.folder / "said", "w") as said:
            self.process = subprocess.Popen(namespace.command(*words) if namespace else list(map(str, words)), stdout=said,
                                            stderr=said, stdin=subprocess.DEVNULL, env=env, start_new_session=True)

    def said(self):
        return (self.folder / "said").read_text()

    def pids(self):
        """Of all ranks that ever were, as their host numbers them."""
        return {int(path.name[4:]) for path in self.folder.glob("pid-*")}

    def steps(self):
        """By process: (number, samples seen, ranks, microseconds, generation) of each whole line."""
        found = {}
        for path in self.folder.glob("steps-*"):
            lines = path.read_text().splitlines(keepends=True)
            found[int(path.name[6:])] = [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]
        return found

    def last(self):
        """The last step of this host, or zeros."""
        return max(filter(None, map(last_line, self.folder.glob("steps-*"))), default=(0, 0, 0, 0, 0))

    def ranks(self):
        """Processes that live: grandchildren of the launcher."""
        return [rank for child in children(self.process.pid) for rank in children(child)]

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class HostsRecovery(unittest.TestCase):
    def setUp(self):
        self.left = LeftBehind()
        print(f"LOCKSTEP_FAULT_SEED={SEED}", flush=True)
        self.random = random.Random(SEED)
        self.folder = self.enterContext(t.temporary_folder())
        self.stack = self.enterContext(contextlib.ExitStack())
        self.hosts, self.nproc, self.made, self.timeout = [], 2, 0, 60

    def tearDown(self):
        self.stack.close()
        self.left.expect_nothing()

    def add(self, *flags, program, namespace=None):
        self.made += 1
        host = Host(self.made, self.folder, self.nproc, flags, program, namespace, self.timeout)
        self.stack.callback(host.close)
        self.hosts.append(host)
        return host

    def steps_program(self, samples, restarts=3):
        return lambda folder: (RANK, folder, self.nproc, restarts, samples, "adam", 3000, "auto")

    def told(self):
        return "\n".join(f"host {i}: {host.said()}" for i, host in enumerate(self.hosts))

    def wait_for(self, condition, what, hosts=None):
        """None of these hosts ends before."""
        limit = time.monotonic() + 120
        while not condition():
            for host in hosts or self.hosts:
                self.assertIsNone(host.process.poll(), f"it ended before {what}: {self.told()}")
            self.assertLess(time.monotonic(), limit, f"no {what}: {self.told()}")
            time.sleep(0.005)

    def all_step(self):
        """Whether all ranks of all hosts that should be there have made a step."""
        made = lambda host: sum(bool(last_line(path)) and alive(int(path.name[6:])) for path in host.folder.glob("steps-*"))
        return all(made(host) == self.nproc for host in self.hosts)

    def end(self, hosts=None):
        for host in hosts or self.hosts:
            self.assertEqual(host.process.wait(180), 0, self.told())

    def check_history(self, samples, hosts=None):
        """All processes tell of the same steps, one after the other, and end with the same weights."""
        seen = {}
        for host in self.hosts:
            for steps in host.steps().values():
                for number, so_far, ranks, _, _ in steps:
                    self.assertEqual(seen.setdefault(number, (so_far, ranks)), (so_far, ranks), f"step {number}")
        self.assertEqual(sorted(seen), list(range(1, len(seen) + 1)))
        before = 0
        for number in sorted(seen):
            so_far, ranks = seen[number]
            self.assertEqual(so_far, before + BATCH * ranks, f"step {number}")
            before = so_far
        self.assertGreaterEqual(before, samples)
        ends = [path.read_text() for host in hosts or self.hosts for path in host.folder.glob("end-*")]
        self.assertEqual(len(ends), self.nproc * len(hosts or self.hosts))
        self.assertEqual(len(set(ends)), 1, ends)

    def test_a_rank_that_is_killed_is_replaced_and_all_others_live_on(self):
        port, kills, samples = free_port(), *((3, 100_000) if LONG else (2, 30_000))
        for number in range(2):
            self.add("--nnodes", 2, "--node-rank", number, "--master-port", port, "--max-restarts", kills,
                     program=self.steps_program(samples))
        took = []
        for _ in range(kills):
            self.wait_for(self.all_step, "steps of all ranks")
            time.sleep(self.random.random() * 0.2)  # The random moment.
            before = {pid for host in self.hosts for pid in host.pids() if alive(pid)}
            generation = max(host.last()[4] for host in self.hosts)
            victim = self.random.choice(sorted(before))
            begin = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            self.wait_for(lambda: all(host.last()[4] > generation for host in self.hosts), "the next generation")
            took.append(time.monotonic() - begin)
            self.assertEqual({pid for pid in before if alive(pid)}, before - {victim})
        self.end()
        self.check_history(samples)
        self.assertEqual(sum(len(host.pids()) for host in self.hosts), 2 * self.nproc + kills)
        print(f"from the kill to a step on all hosts: {', '.join(f'{one:.2f}' for one in took)} s", flush=True)

    def train(self, flags_of, epochs):
        """Starts `lockstep train` on a host. `flags_of`: of a host's launcher."""
        self.hosts, self.folder = [], self.enterContext(t.temporary_folder())
        self.flags_of, self.epochs = flags_of, epochs
        self.add_training()
        self.metrics = self.hosts[0].folder / "metrics"

    def add_training(self):
        return self.add(*self.flags_of(len(self.hosts)), program=lambda folder: (
            t.LOCKSTEP, "train", "--dataset", "digits", "--max-epochs", self.epochs, "--log-every-n-steps", 1,
            "--metrics-file", folder / "metrics", "--save-weights", folder / "weights"))

    def rows(self, split):
        return self.metrics.read_text().count(f'"split":"{split}"') if self.metrics.exists() else 0

    def wait_for_steps(self, more):
        """False where the job ends before."""
        seen = self.rows("train")
        t.wait_until(lambda: self.rows("train") > seen + more or self.hosts[0].process.poll() is not None, 120, "steps")
        return self.hosts[0].process.poll() is None

    def train_with_kills(self, kills):
        """The digest of the weights, and how many ranks were killed."""
        port, killed = free_port(), 0
        self.train(lambda number: ("--nnodes", 2, "--node-rank", number, "--master-port", port, "--max-restarts", kills + 1), 60 if LONG else 12)
        self.add_training()
        for _ in range(kills):
            if not self.wait_for_steps(self.random.randrange(60)):
                break
            before = [rank for host in self.hosts for rank in host.ranks()]
            if len(before) < 2 * self.nproc:
                continue
            victim = self.random.choice(before)
            os.kill(victim, signal.SIGKILL)
            killed += 1
            if self.wait_for_steps(2):
                now = {rank for host in self.hosts for rank in host.ranks()}
                self.assertLessEqual(set(before) - {victim}, now, self.told())
        self.end()
        return hashlib.sha256((self.hosts[0].folder / "weights").read_bytes()).hexdigest(), killed

    def test_the_weights_of_training_are_those_of_an_undisturbed_run(self):
        expected, _ = self.train_with_kills(0)
        got, killed = self.train_with_kills(3)
        self.assertGreater(killed, 0)
        self.assertEqual(got, expected, self.told())

    def test_training_goes_on_without_hosts_that_are_killed_or_told_to_stop_and_with_one_that_comes(self):
        endpoint = f"127.0.0.1:{free_port()}"
        self.train(lambda _: ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"), 100_000)
        self.assertTrue(self.wait_for_steps(0), self.told())  # It has rank 0.
        stays, ranks = self.hosts[0], self.hosts[0].ranks()
        resumed = lambda: stays.said().count("resumed after step")
        goes = self.add_training()
        self.wait_for(lambda: resumed() == 1, "steps of two hosts")
        self.assertTrue(self.wait_for_steps(self.random.randrange(60)), self.told())
        goes.close()
        self.hosts.remove(goes)
        self.wait_for(lambda: resumed() == 2, "steps of one host")
        goes = self.add_training()
        self.wait_for(lambda: resumed() == 3, "steps of two hosts again")
        self.assertTrue(self.wait_for_steps(self.random.randrange(60)), self.told())
        goes.process.send_signal(signal.SIGTERM)
        self.assertEqual(goes.process.wait(60), 128 + signal.SIGTERM, self.told())
        self.hosts.remove(goes)
        seen = self.rows("test")
        self.wait_for(lambda: self.rows("test") > seen, "the end of an epoch")
        self.assertEqual(stays.ranks(), ranks)
        stays.process.send_signal(signal.SIGTERM)
        self.assertEqual(stays.process.wait(60), 128 + signal.SIGTERM, self.told())
        rows = map(json.loads, self.metrics.read_text().splitlines())
        epochs = [row["epoch"] for row in rows if row["split"] == "test"]
        self.assertEqual(epochs, list(range(1, len(epochs) + 1)))

    def test_a_rank_that_hangs_costs_no_other_process(self):
        port, self.timeout = free_port(), 15
        self.train(lambda number: ("--nnodes", 2, "--node-rank", number, "--master-port", port, "--max-restarts", 2), 12)
        self.add_training()
        self.assertTrue(self.wait_for_steps(self.random.randrange(60)), self.told())
        t.wait_until(lambda: sum(len(host.ranks()) for host in self.hosts) == 4, 60, "all ranks")
        before = [rank for host in self.hosts for rank in host.ranks()]
        victim = self.random.choice(before)
        os.kill(victim, signal.SIGSTOP)
        t.wait_until(lambda: not alive(victim), 120, "the end of the rank that hangs")
        self.assertTrue(self.wait_for_steps(2), self.told())
        now = {rank for host in self.hosts for rank in host.ranks()}
        self.assertLessEqual(set(before) - {victim}, now, self.told())
        self.end()

    def test_a_failure_without_a_restart_that_is_left_ends_all(self):
        port = free_port()
        for number in range(2):
            self.add("--nnodes", 2, "--node-rank", number, "--master-port", port, "--max-restarts", 1,
                     program=self.steps_program(100_000_000))
        for _ in range(2):
            self.wait_for(self.all_step, "steps of all ranks")
            os.kill(self.random.choice([p for host in self.hosts for p in host.pids() if alive(p)]), signal.SIGKILL)
            t.wait_until(lambda: not self.all_step(), 60, "the loss")
        for host in self.hosts:
            self.assertEqual(host.process.wait(60), 128 + signal.SIGKILL, self.told())

    @unittest.skipIf(hosts_testing.why_no_hosts(), hosts_testing.why_no_hosts())
    def test_the_others_go_on_without_a_host_that_vanishes_and_with_one_that_comes(self):
        self.nproc = self.random.choice([1, 2])  # Over Gloo, or by the hierarchy.
        with hosts_testing.bridged_hosts(4) as machines:
            samples = 24_000 * self.nproc
            flags = ("--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:29400",
                     "--rdzv-id", "job")
            for machine in machines[:3]:
                self.add(*flags, program=self.steps_program(samples), namespace=machine)
            sizes = lambda hosts, ranks: all(host.last()[2] == ranks * self.nproc for host in hosts)
            self.wait_for(lambda: sizes(self.hosts, 3), "steps of three hosts")
            time.sleep(self.random.random() * 0.5)  # The random moment.
            lost = self.random.choice(self.hosts[1:])
            survivors = [host for host in self.hosts if host is not lost]
            pids = [host.pids() for host in survivors]
            lost.namespace.kill()
            begin = time.monotonic()
            self.wait_for(lambda: sizes(survivors, 2), "steps of the two that are left", survivors)
            took = time.monotonic() - begin
            print(f"{self.nproc} ranks a host, from the loss of one to the next step of the others: {took:.2f} s", flush=True)
            comes = self.add(*flags, program=self.steps_program(samples), namespace=machines[3])
            survivors.append(comes)
            self.wait_for(lambda: sizes(survivors, 3), "steps with the host that comes", survivors)
            self.end(survivors)
            self.assertEqual([host.pids() for host in survivors[:2]], pids)
            self.check_history(samples, survivors)


def children(pid):
    try:
        return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    unittest.main()
