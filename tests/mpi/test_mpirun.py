"""Programs as ranks of mpirun: no flag but -np, the results of `lockstep run`, and nothing left when a
rank is killed.

LOCKSTEP_FAULT_SEED repeats a run."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import tempfile
import time
import unittest

import lockstep_testing as t
import mpi_testing
import run_testing
from left_behind import LeftBehind

SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
TRAIN = (t.LOCKSTEP, "train", "--model", "mlp", "--dataset", "digits", "--max-epochs", 1)
HAS_MPI = None


def losses(path):
    """What a run's metrics say of each step, in full digits."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["loss"] for row in rows if row["split"] == "train"]


class Launch(unittest.TestCase):
    def setUp(self):
        self.left_behind = LeftBehind()

    def tearDown(self):
        self.left_behind.expect_nothing()

    def run_ok(self, ranks, *words, **kwargs):
        code, out, err = mpi_testing.mpirun(ranks, *words, **kwargs)
        self.assertEqual(code, 0, f"{words}\n{out}\n{err}")
        return out

    def test_auto_is_shared_memory_on_one_host(self):
        out = self.run_ok(2, *TRAIN, "--limit-train-batches", 3)
        self.assertIn("2 ranks over shm on cpu", out)
        self.assertEqual(out.count("test accuracy"), 1)

    def test_every_backend_gives_the_losses_of_lockstep_run(self):
        """Two ranks' sums have no order, so every backend gives the same bits, and so must the launcher."""
        with t.temporary_folder() as folder:
            flags = ("--limit-train-batches", 20, "--log-every-n-steps", 1)
            code, out, err = run_testing.lockstep_run("--nproc-per-node", 2, *TRAIN, *flags, "--backend", "gloo",
                                                      "--metrics-file", folder / "run.jsonl")
            self.assertEqual(code, 0, out + err)
            wanted = losses(folder / "run.jsonl")
            self.assertEqual(len(wanted), 20)
            for backend in ["gloo", "shm"] + (["mpi"] if HAS_MPI else []):
                with self.subTest(backend):
                    path = folder / f"{backend}.jsonl"
                    shown = self.run_ok(2, *TRAIN, *flags, "--backend", backend, "--metrics-file", path)
                    self.assertIn(f"2 ranks over {backend} ", shown)
                    self.assertEqual(losses(path), wanted)

    def test_a_job_of_one_and_of_more_ranks_than_cores(self):
        self.run_ok(1, *TRAIN, "--limit-train-batches", 3)
        if HAS_MPI:
            self.run_ok(1, *TRAIN, "--limit-train-batches", 3, "--backend", "mpi")
            self.assertIn("5 ranks over mpi", self.run_ok(5, *TRAIN, "--limit-train-batches", 3, "--backend", "mpi"))

    def test_output_that_is_no_terminal_gets_plain_lines(self):
        """mpirun gives its ranks a terminal of its own."""
        out = self.run_ok(2, *TRAIN, "--limit-train-batches", 3, env={"TERM": "xterm"})
        self.assertNotIn("\x1b", out)
        self.assertNotIn("ETA", out)

    def test_told_addresses_are_taken(self):
        """As in a job on several hosts whose user names rank 0's; the port is rank 0's choice."""
        code, out, err = mpi_testing.mpirun(2, *TRAIN, "--limit-train-batches", 3, "--backend", "gloo",
                                            env={"MASTER_ADDR": "127.0.0.1"})
        self.assertEqual(code, 0, out + err)

    def test_two_jobs_at_once_do_not_meet(self):
        with mpi_testing.MpiRun(2, *TRAIN, "--limit-train-batches", 10) as one, \
                mpi_testing.MpiRun(2, *TRAIN, "--limit-train-batches", 10) as other:
            for job in (one, other):
                code, out, err = job.end()
                self.assertEqual(code, 0, out + err)

    def test_without_mpirun_the_error_says_so(self):
        if not HAS_MPI:
            self.skipTest("Lockstep was built without MPI")
        code, out, err = run_testing.lockstep_run("--nproc-per-node", 2, *TRAIN, "--backend", "mpi")
        self.assertNotEqual(code, 0)
        self.assertIn("was not started by mpirun", out + err)
        self.assertIn("mpirun -np 2", out + err)

    def test_a_launcher_under_mpirun_is_told_apart(self):
        """mpirun -np 1 lockstep run ...: the workers' rank 1 is none of mpirun's."""
        if not HAS_MPI:
            self.skipTest("Lockstep was built without MPI")
        run = (t.LOCKSTEP, "run", "--nproc-per-node", 2, *TRAIN, "--limit-train-batches", 3)
        code, out, err = mpi_testing.mpirun(1, *run, "--backend", "mpi")
        self.assertNotEqual(code, 0, out + err)
        self.assertIn("not by another launcher", out + err)
        code, out, err = mpi_testing.mpirun(1, *run)
        self.assertEqual(code, 0, out + err)

    def test_one_process_needs_no_mpirun(self):
        if not HAS_MPI:
            self.skipTest("Lockstep was built without MPI")
        with t.temporary_folder() as folder:
            result = t.run(*TRAIN, "--limit-train-batches", 3, "--backend", "mpi",
                           env=t.clean_environment(TMPDIR=folder, OMPI_MCA_orte_tmpdir_base=folder))
            self.assertIn("test accuracy", result.stdout)

    def test_a_build_without_mpi_says_what_to_install(self):
        if HAS_MPI:
            self.skipTest("Lockstep was built with MPI")
        code, out, err = mpi_testing.mpirun(2, *TRAIN, "--backend", "mpi")
        self.assertEqual(code, 2, out + err)
        self.assertIn("libopenmpi-dev", out + err)

    def test_env_names_the_mpi(self):
        shown = t.run(t.LOCKSTEP, "env").stdout
        self.assertRegex(shown, r"(?m)^mpi +" + ("Open MPI [\\d.]+" if HAS_MPI else "none"))

    def test_bench(self):
        if not HAS_MPI:
            self.skipTest("Lockstep was built without MPI")
        with t.temporary_folder() as folder:
            environment = t.clean_environment(TMPDIR=folder, OMPI_MCA_orte_tmpdir_base=folder)
            result = t.run(t.LOCKSTEP, "bench", "allreduce", "--sizes", "4,65536", "--backend", "mpi,gloo", "--steps", 5,
                           "--rounds", 1, "--json", env=environment)
            rows = json.loads(result.stdout)
            rows = rows["results"] if isinstance(rows, dict) else rows
            self.assertEqual({row["backend"] for row in rows}, {"mpi", "gloo"})
            self.assertTrue(all(row["p50_us"] > 0 for row in rows))

    def test_examples(self):
        """Programs whose ranks the launcher starts; start and init see that it has."""
        folder = t.BUILD_DIR / "examples"
        if not folder.exists():
            self.skipTest("the examples are not built")
        out = self.run_ok(2, folder / "quickstart" / "distributed")
        self.assertEqual(out.count("epoch 1: accuracy"), 2, out)  # The launcher shows what all print.
        out = self.run_ok(2, folder / "004_distributed_training" / "distributed_example", "--limit", 600, "--epochs", 1)
        self.assertIn("2 processes", out)

    def test_a_simulation_hands_in_its_communicator(self):
        program = t.BUILD_DIR / "examples" / "mpi_simulation" / "heat"
        if not HAS_MPI or not program.exists():
            self.skipTest("Lockstep was built without MPI or the examples")
        for ranks in (1, 3):
            learned = re.search(r"learned ([\d.]+) ([\d.]+) ([\d.]+) of", self.run_ok(ranks, program))
            self.assertEqual(learned.groups(), ("0.20", "0.60", "0.20"))
        with t.temporary_folder() as folder:  # No launcher at all.
            alone = t.run(program, env=t.clean_environment(TMPDIR=folder, OMPI_MCA_orte_tmpdir_base=folder)).stdout
            self.assertIn("1 ranks", alone)

    def test_worlds_of_communicators_that_the_program_made(self):
        if not HAS_MPI:
            self.skipTest("Lockstep was built without MPI")
        program = t.BUILD_DIR / "tests" / "lockstep_mpi_communicator_rank"
        self.assertEqual(self.run_ok(5, program, "multiple", "mpi", "shm").split(), ["ok"] * 5)
        self.assertEqual(self.run_ok(4, program, "funneled", "auto", "gloo").split(), ["ok"] * 4)


class Mpich(unittest.TestCase):
    """MPICH's mpiexec (Hydra). Debian has it beside Open MPI's mpirun."""

    @classmethod
    def setUpClass(cls):
        if not shutil.which("mpiexec.hydra"):
            raise unittest.SkipTest("no mpiexec.hydra: install mpich")

    def mpiexec(self, ranks, *words, **variables):
        return t.run("mpiexec.hydra", "-np", ranks, *words, check=False, env=t.clean_environment(**variables))

    def test_its_ranks_are_one_job(self):
        short = (*TRAIN, "--limit-train-batches", 3)
        for words in (short, ("sh", "-c", 'exec "$@"', "sh", *short)):
            result = self.mpiexec(2, *words)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("2 ranks over shm on cpu", result.stdout)
            self.assertEqual(result.stdout.count("test accuracy"), 1)
        quickstart = t.BUILD_DIR / "examples" / "quickstart" / "distributed"
        if quickstart.exists():
            self.assertEqual(self.mpiexec(2, quickstart).stdout.count("epoch 1: accuracy"), 2)

    def test_over_another_mpi_it_is_an_error(self):
        if HAS_MPI:
            result = self.mpiexec(2, *TRAIN, "--backend", "mpi")
            self.assertNotEqual(result.returncode, 0)
            self.assertIn("mpirun", result.stdout + result.stderr)


AGENT = """#!/bin/sh
# AGENT HOST COMMAND...: in place of ssh; runs the command here, where the host has that name.
host=$1; shift
exec unshare --uts sh -c "hostname $host && exec sh -c \\"\\$0\\"" "$*"
"""


class SeveralHosts(unittest.TestCase):
    """Hosts are name spaces with a name of their own, in which mpirun starts its daemons."""

    @classmethod
    def setUpClass(cls):
        if t.run("unshare", "--uts", "true", check=False).returncode != 0:
            raise unittest.SkipTest("no right to give a process another host name (unshare --uts)")

    def train(self, hosts, ranks, *flags, env=None):
        with t.temporary_folder() as folder:
            agent = folder / "agent"
            agent.write_text(AGENT)
            agent.chmod(0o700)
            return mpi_testing.mpirun(ranks, *TRAIN, "--limit-train-batches", 5, *flags, env=env,
                                      options=("--mca", "plm_rsh_agent", agent, "--host", hosts))

    def test_one_rank_a_host(self):
        if not HAS_MPI:
            self.skipTest("Lockstep was built without MPI")
        shown = {}
        for backend in ("mpi", "gloo"):
            code, out, err = self.train("nodea:1,nodeb:1", 2, "--backend", backend)
            self.assertEqual(code, 0, out + err)
            self.assertIn(f"2 ranks over {backend} on cpu", out)
            shown[backend] = out.rstrip().splitlines()[-1]
        self.assertEqual(shown["mpi"], shown["gloo"])

    def test_several_ranks_a_host_are_joined_host_by_host(self):
        if not HAS_MPI:
            self.skipTest("Lockstep was built without MPI")
        code, out, err = self.train("nodea:2,nodeb:2", 4)
        self.assertEqual(code, 0, out + err)
        self.assertIn("4 ranks over hierarchical on cpu", out)

    def test_the_named_address_of_rank_0_is_taken(self):
        code, out, err = self.train("nodea:1,nodeb:1", 2, "--backend", "gloo",
                                    env={"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
        self.assertEqual(code, 0, out + err)

    def test_without_mpi_the_address_must_be_named(self):
        if HAS_MPI:
            self.skipTest("Lockstep was built with MPI")
        code, out, err = self.train("nodea:1,nodeb:1", 2)
        self.assertEqual(code, 2, out + err)
        self.assertIn("mpirun -x MASTER_ADDR=HOST", out + err)


class Faults(unittest.TestCase):
    """mpirun ends the job when a rank dies; nothing of it may stay, and its exit code is not 0."""

    def setUp(self):
        self.left_behind = LeftBehind()

    def tearDown(self):
        self.left_behind.expect_nothing()

    def kill_one(self, number, backend):
        seed = SEED + number
        choose = random.Random(seed)
        ranks, victim = choose.choice([(2, 0), (2, 1), (3, 0), (3, 2)])
        delay = choose.uniform(0, 1.5)
        with self.subTest(f"seed {seed}: rank {victim} of {ranks} over {backend} after {delay:.3f} s"), \
                mpi_testing.MpiRun(ranks, *TRAIN[:-1], 1000, "--backend", backend) as job:
            t.wait_until(lambda: len(job.ranks_of(t.LOCKSTEP)) == ranks, what="the start of all ranks")
            time.sleep(delay)  # The random moment; nothing is waited for.
            os.kill(job.ranks_of(t.LOCKSTEP)[victim], signal.SIGKILL)
            code, out, err = job.end(timeout=30)
            self.assertNotEqual(code, 0)
            self.assertRegex(err, rf"rank {victim}.* exited on signal 9|signal 9 \(Killed\)")
            job.nothing_left()

    def test_a_killed_rank_ends_the_job(self):
        for number in range(40 if LONG else 4):
            self.kill_one(number, "mpi" if HAS_MPI and number % 2 == 0 else "auto")

    def test_survivors_name_the_rank_that_was_killed(self):
        """Where the launcher does not end them, as mpirun is told here and srun does by itself."""
        program = t.BUILD_DIR / "tests" / "lockstep_fault_rank"
        if not HAS_MPI:
            self.skipTest("Lockstep was built without MPI")
        choose = random.Random(SEED + 2000)
        victim = choose.randrange(3)
        with mpi_testing.MpiRun(3, program, "loop", "env://", 30, env={"TEST_BACKEND": "mpi"},
                                options=("--enable-recovery",)) as job:
            t.wait_until(lambda: len(job.ranks_of(program)) == 3, what="the start of all ranks")
            while b"round 3" not in job.process.stdout.readline():
                pass
            time.sleep(choose.uniform(0, 0.3))  # The random moment; nothing is waited for.
            number = job.ranks_of(program)[victim]
            os.kill(number, signal.SIGKILL)
            code, out, err = job.end(timeout=60)
            errors = re.findall(r"error PeerLostError rank (\d): .*", out)
            self.assertEqual(sorted(map(int, errors)), sorted({0, 1, 2} - {victim}), out[-3000:])
            self.assertIn(f"rank {victim} (process {number}) has ended", out)
            job.nothing_left()

    def test_an_interrupted_job_leaves_nothing(self):
        choose = random.Random(SEED + 1000)
        with mpi_testing.MpiRun(2, *TRAIN[:-1], 1000, "--backend", "mpi" if HAS_MPI else "auto") as job:
            t.wait_until(lambda: len(job.ranks_of(t.LOCKSTEP)) == 2, what="the start of all ranks")
            time.sleep(choose.uniform(0, 1.5))  # The random moment; nothing is waited for.
            job.process.send_signal(signal.SIGINT)
            code, out, err = job.end(timeout=30)
            self.assertNotEqual(code, 0, out + err)
            job.nothing_left()

    def test_a_rank_that_fails_by_itself_ends_the_job_and_is_heard(self):
        """Rank 1 has no such file in its folder. The others wait for it in vain, until mpirun ends them."""
        with tempfile.TemporaryDirectory() as folder:
            header = json.dumps({"data": {"dtype": "U8", "shape": [64, 28, 28], "data_offsets": [0, 64 * 784]},
                                 "targets": {"dtype": "U8", "shape": [64], "data_offsets": [64 * 784, 64 * 785]}})
            path = pathlib.Path(folder) / "images.safetensors"
            path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(64 * 785))
            program = (f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] || cd {folder}; '
                       f'exec {t.LOCKSTEP} train --model mlp --max-epochs 1 --dataset file:images.safetensors')
            for backend in ("mpi", "gloo") if HAS_MPI else ("gloo",):
                with self.subTest(backend):
                    code, out, err = mpi_testing.mpirun(2, "sh", "-c", f"{program} --backend {backend}", timeout=60)
                    self.assertNotEqual(code, 0, out + err)
                    self.assertRegex(out + err, r"error: .*images\.safetensors")


if __name__ == "__main__":
    reason = mpi_testing.missing()
    if reason:
        mpi_testing.skip_all(reason)
    print(f"LOCKSTEP_FAULT_SEED={SEED}", flush=True)
    HAS_MPI = mpi_testing.lockstep_has_mpi()
    t.main()
