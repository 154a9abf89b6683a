"""Kinds of faults (NVIDIA's list) against workers, launchers and registries, at random moments from a printed seed; and restarts
under torchrun, and of ranks in C++ and Python together."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import unittest

import lockstep_testing as t
from run_testing import CPP_RANK, TORCHRUN, Launched, lockstep_run, marked_environment, running
from test_elastic import LONG, SEED, SNAPSHOTS, Etcd, Job, setUpModule  # noqa: F401  (prints the seed)

PEER = t.SOURCE_DIR / "tests/interop/comm_peer.py"
LAST_STEP = 100

# Trains nothing, but as programs do: a collective, then a snapshot, and from there after a restart. What `fault` names it does.
# A minute is for those that start. Rank 0 has all end when the folder holds `end`.
PYTHON_WORKER = """
import ctypes, datetime, os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
steps = dist.new_group(timeout=datetime.timedelta(seconds=5))
rank = dist.get_rank()
step = int(open("snapshot").read()) if os.path.exists("snapshot") else 0
faults = {
    "sleep": lambda: time.sleep(1000),
    "abort": os.abort,
    "lock held": lambda: ctypes.PyDLL(None).sleep(1000),
    "segfault": lambda: ctypes.string_at(0),
}
while True:
    last = torch.tensor(int(rank == 0 and os.path.exists("end")))
    dist.all_reduce(last, group=steps)
    if last:
        break
    step += 1
    if rank == 0:
        with open("snapshot.new", "w") as file:
            file.write(str(step))
        os.replace("snapshot.new", "snapshot")
        open("lived." + os.environ["TORCHELASTIC_RESTART_COUNT"], "w").close()
    if rank == 1 and os.path.exists("fault"):
        name = open("fault").read()
        os.remove("fault")
        faults[name]()
    time.sleep(0.02)
dist.destroy_process_group()  # Else torch's threads may outlive it, and end the process by SIGABRT.
"""

SIGNALS = {name: getattr(signal, "SIG" + name) for name in ("SEGV", "ABRT", "INT", "KILL", "TERM", "STOP")}
# Who is hit.
TARGETS = ("C++ worker", "launcher", "etcd")
# From outside, or it does it to itself. The short form has one of each group.
FAULTS_OF_PYTHON = (("INT", "KILL", "TERM", "abort", "segfault"), ("STOP", "sleep", "lock held"))


class Faults(unittest.TestCase):
    def setUp(self):
        self.chance = random.Random(SEED)

    def moment(self):
        time.sleep(self.chance.uniform(0, 0.3))

    def test_each_kind_against_each_target(self):
        """In the short form STOP and one of the others."""
        some = lambda: SIGNALS if LONG else ("STOP", self.chance.choice([name for name in SIGNALS if name != "STOP"]))
        faults = [("embedded registry", "STOP"), *((target, name) for target in TARGETS for name in some())]
        for target, name in faults:
            with self.subTest(target=target, fault=name), t.temporary_folder() as folder:
                getattr(self, target.split()[0].lower().replace("+", "p"))(folder, name)

    def survive(self, job, err_of_restart="(restart 1 of 3)"):
        code, _, err = job.end(180)
        job.nothing_left()
        self.assertEqual(code, 0, err)
        self.assertIn(err_of_restart, err)

    def cpp(self, folder, name):
        """One of the ranks. One that stands still is noticed by the time-out of the others."""
        with Launched("--max-restarts", 3, "--nproc-per-node", 2, SNAPSHOTS, LAST_STEP, 1, cwd=folder,
                      env={"LOCKSTEP_TIMEOUT": "3"}) as job:
            t.wait_until((folder / "snapshot.safetensors").exists, 60, "the first snapshot")
            self.moment()
            os.kill(self.chance.choice(running(job.mark, SNAPSHOTS)), SIGNALS[name])
            self.survive(job)

    def test_each_kind_against_a_worker_in_python(self):
        """One job has them all, as it takes long to start."""
        faults = [name for group in FAULTS_OF_PYTHON for name in (group if LONG else [self.chance.choice(group)])]
        print(faults, flush=True)
        with t.temporary_folder() as folder:
            (folder / "worker.py").write_text(PYTHON_WORKER)
            with Launched("--max-restarts", len(faults), "--nproc-per-node", 2, "worker.py", cwd=folder,
                          env={"PYTHON_EXEC": sys.executable}) as job:
                for restarts, name in enumerate(faults):
                    self.wait_for_life(folder, job, restarts)
                    self.moment()
                    if name in SIGNALS:
                        os.kill(self.chance.choice(running(job.mark, os.path.realpath(sys.executable))), SIGNALS[name])
                    else:
                        (folder / "new").write_text(name)
                        (folder / "new").rename(folder / "fault")
                self.wait_for_life(folder, job, len(faults))
                before = int((folder / "snapshot").read_text())
                t.wait_until(lambda: int((folder / "snapshot").read_text()) > before, 60, "a step")
                (folder / "end").touch()
                self.survive(job, f"(restart {len(faults)} of {len(faults)})")

    def wait_for_life(self, folder, job, restarts):
        """Until the workers have made a step after so many restarts."""
        lives = (folder / f"lived.{restarts}").exists
        t.wait_until(lambda: lives() or job.process.poll() is not None, 120, f"a step after {restarts} restarts")
        self.assertIsNone(job.process.poll(), f"it has ended after {restarts} restarts")

    def launcher(self, folder, name):
        """Of a host that does not serve the registry. The others go on; one that only stood still is back in its place."""
        with Job("--nnodes", "1:2", "--keep-alive", 1, folder=folder) as job:
            job.add("a")
            job.generation(1)
            job.add("b")
            job.generation(2)
            self.moment()
            job.hosts["b"].send(SIGNALS[name])
            self.assertEqual(job.generation(1), {0: (0, "a")})
            if name == "STOP":
                job.hosts["b"].send(signal.SIGCONT)
                self.assertEqual(job.generation(2), {0: (0, "a"), 1: (1, "b")})
            else:
                lost = job.hosts.pop("b")
                self.assertNotEqual(lost.end(60)[0], 0)
                lost.nothing_left()
            for host, (code, err) in job.end().items():
                self.assertEqual(code, 0, f"{host}: {err}")

    def embedded(self, folder, name):
        """A registry that stands still for less than five --keep-alive: nobody starts again."""
        with Job("--nnodes", "1:2", "--keep-alive", 2, folder=folder) as job:
            job.add("a")
            job.generation(1)
            job.add("b")
            job.generation(2)
            self.moment()
            job.hosts["a"].send(SIGNALS[name])
            t.wait_until(lambda: self.given_up(job.port) >= 4, 30, "requests that nobody answered in time")
            job.hosts["a"].send(signal.SIGCONT)
            self.expect_end_of_this_generation(folder, job)

    @staticmethod
    def given_up(port):
        """Connections to the port that the other side has closed, and who serves it has not."""
        lines = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(line[1].endswith(f":{port:04X}") and line[3] == "08" for line in lines)  # CLOSE_WAIT

    def etcd(self, folder, name):
        if not Etcd.is_there():
            self.skipTest("etcd is not installed")
        # Where the leader dies, another is elected within 2 s, and later on a busy machine.
        with Etcd() as etcd, Job("--nnodes", 2, "--keep-alive", 4, folder=folder, backend="etcd", endpoint=etcd.endpoint) as job:
            job.add("a"), job.add("b")
            job.generation(2)
            self.moment()
            etcd.members[self.chance.randrange(3)].send_signal(SIGNALS[name])
            before = etcd.leases_kept()
            # Each host's lease lasts for 4 s and is kept three times in that.
            kept = lambda: sum(count - before.get(member, 0) for member, count in etcd.leases_kept().items()) > 9
            t.wait_until(lambda: kept() or any(host.process.poll() is not None for host in job.hosts.values()), 60,
                         "leases that are kept")
            self.expect_end_of_this_generation(folder, job)

    def expect_end_of_this_generation(self, folder, job):
        for host, (code, err) in job.end().items():
            self.assertEqual(code, 0, f"{host}: {err}")
        self.assertEqual(list(folder.glob("at.*")), [], "the ranks have started again")


class Elsewhere(unittest.TestCase):
    def test_a_program_in_cpp_starts_again_under_torchrun(self):
        if not TORCHRUN.exists():
            self.skipTest("no torchrun beside this Python")
        with t.temporary_folder() as folder:
            env, mark = marked_environment()
            job = subprocess.Popen([TORCHRUN, "--standalone", "--max-restarts", "3", "--nproc-per-node", "2", "--no-python",
                                    SNAPSHOTS, str(LAST_STEP), "1"], cwd=folder, env=env, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
            try:
                t.wait_until((folder / "snapshot.safetensors").exists, 120, "the first snapshot")
                os.kill(random.Random(SEED).choice(running(mark, SNAPSHOTS)), signal.SIGKILL)
                out, err = job.communicate(timeout=180)
            finally:
                job.kill()
                job.wait(20)
            self.assertEqual(job.returncode, 0, err)
            self.assertIn("Resuming training from snapshot", out)
            self.assertIn(f"Epoch {LAST_STEP - 1}", out)

    def test_ranks_in_cpp_and_python_meet_again(self):
        text = (f'if [ "$TORCHELASTIC_RESTART_COUNT$RANK" = 0$FAILS ]; then sleep 1; kill -KILL $$; fi; '
                f'if [ "$RANK" = 1 ]; then exec "{sys.executable}" "{PEER}" init; fi; exec "{CPP_RANK}" init')
        for fails in (0, 1) if LONG else (random.Random(SEED).randrange(2),):
            code, out, err = lockstep_run("--nproc-per-node", 2, "--max-restarts", 1, "sh", "-c", text, env={"FAILS": fails},
                                          timeout=120)
            self.assertEqual(code, 0, err)
            self.assertIn("(restart 1 of 1)", err)
            self.assertEqual(len([line for line in out.splitlines() if '"sum"' in line]), 2, out)


if __name__ == "__main__":
    t.main()
