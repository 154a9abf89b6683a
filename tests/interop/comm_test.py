"""C++ ranks as processes: every launcher's variables, Python ranks in the same Gloo group, torchrun,
and what bad input gets."""

import json
import os
import pathlib
import shlex
import socket
import subprocess
import time
import unittest

import lockstep_testing as lt
import torch_forks

RANK = lt.BUILD_DIR / "tests" / "lockstep_comm_rank"
PEER = pathlib.Path(__file__).parent / "comm_peer.py"
NO_TORCH = "Python's torch is not the LibTorch that is linked"
SAME_TORCH = lt.torch_is_the_linked_one()


class Job:
    """Ranks of one job, started side by side; every one of them is reaped."""

    def __init__(self):
        self.processes = []

    def start(self, command, stdin=subprocess.DEVNULL, **variables):
        self.processes.append(subprocess.Popen([str(c) for c in command], stdin=stdin,
                                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                               env=lt.clean_environment(**variables)))

    def finish(self, timeout=90):
        """(exit code, parsed standard output or None, standard error) of each."""
        results = []
        deadline = time.monotonic() + timeout
        try:
            for process in self.processes:
                if process.stdin:
                    process.stdin.close()
                    process.stdin = None
            for process in self.processes:
                out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                lines = [line for line in out.splitlines() if line.startswith("{")]
                results.append((process.returncode, json.loads(lines[-1]) if lines else None, err))
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return results


def held_port():
    """A socket bound to a free loopback port, and the port; nothing listens on it."""
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    return holder, holder.getsockname()[1]


def free_port():
    holder, port = held_port()
    holder.close()
    return port


def torchrun_variables(rank, size, port, **more):
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCKSTEP_TIMEOUT": 60, **more}


def run_ranks(commands, variables):
    """Starts one process a command. A port that somebody else took meanwhile is tried anew."""
    for _ in range(5):
        port = free_port()
        job = Job()
        for rank, command in enumerate(commands):
            job.start(command, **variables(rank, port))
        results = job.finish()
        if not any("the port is taken" in err for _, _, err in results):
            return results
    raise AssertionError(f"no free port: {results}")


class Launchers(unittest.TestCase):
    def check(self, results, launcher, local_ranks):
        for rank, (code, out, err) in enumerate(results):
            self.assertEqual(code, 0, err)
            self.assertEqual(out["launcher"], launcher)
            self.assertEqual((out["rank"], out["size"], out["sum"]), (rank, len(results), 3))
            self.assertEqual(out["local_rank"], local_ranks[rank])
            self.assertEqual(err, "")

    def test_torchruns_variables(self):
        results = run_ranks([[RANK, "init"]] * 2, lambda r, p: torchrun_variables(r, 2, p))
        self.check(results, "torchrun", [0, 1])

    def test_bare_variables_find_the_local_ranks(self):
        host = socket.gethostname()
        results = run_ranks([[RANK, "init"]] * 2, lambda r, p: {
            "RANK": r, "WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": p, "LOCKSTEP_TIMEOUT": 60})
        self.check(results, "torchrun", [0, 1])

    def test_slurms_variables(self):
        results = run_ranks([[RANK, "init"]] * 2, lambda r, p: {
            "SLURM_PROCID": r, "SLURM_NTASKS": 2, "SLURM_LOCALID": r, "SLURM_NODEID": 0, "SLURM_NNODES": 1,
            "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": p, "LOCKSTEP_TIMEOUT": 60})
        self.check(results, "slurm", [0, 1])

    def test_open_mpis_variables(self):
        # Where the ranks meet is told, as no mpirun is there to ask: tests/mpi starts a real one.
        results = run_ranks([[RANK, "init"]] * 2, lambda r, p: {
            "OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": r,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": p, "LOCKSTEP_TIMEOUT": 60})
        self.check(results, "openmpi", [0, 1])

    def test_tcp_and_file_urls(self):
        for kind in ("tcp", "file"):
            with lt.temporary_folder() as folder:
                def command(rank, port):
                    where = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{folder}/meet-{port}"
                    return [RANK, "init", f"{where}?rank={rank}&world_size=2"]
                for _ in range(5):
                    port, job = free_port(), Job()
                    for rank in range(2):
                        job.start(command(rank, port), LOCKSTEP_TIMEOUT=60)
                    results = job.finish()
                    if not any("the port is taken" in err for _, _, err in results):
                        break
                self.check(results, "explicit", [0, 1])
                self.assertEqual(list(folder.iterdir()), [])

    def test_no_launcher(self):
        out = json.loads(lt.run(RANK, "init").stdout)
        self.assertEqual((out["launcher"], out["size"], out["sum"]), ("none", 1, 1))


@unittest.skipUnless(SAME_TORCH, NO_TORCH)
class WithPython(unittest.TestCase):
    """The same operations in a group of C++ ranks, of Python ranks and of both: the same bits."""

    def results(self, mode, kinds):
        commands = [[RANK, mode] if kind == "c" else [*torch_forks.python(), PEER, mode] for kind in kinds]
        results = run_ranks(commands, lambda r, p: torchrun_variables(r, len(kinds), p))
        for code, _, err in results:
            self.assertEqual(code, 0, err)
        return [out["results"] for _, out, _ in results]

    def test_two_ranks(self):
        python = self.results("ops", "pp")
        for kinds in ("cc", "cp", "pc"):
            with self.subTest(kinds):
                self.assertEqual(self.results("ops", kinds), python)

    def test_three_ranks(self):
        python = self.results("ops", "ppp")
        for kinds in ("ccc", "cpc"):
            with self.subTest(kinds):
                self.assertEqual(self.results("ops", kinds), python)

    def test_sub_groups(self):
        python = self.results("groups", "ppp")
        self.assertEqual(self.results("groups", "ccc"), python)
        self.assertEqual(self.results("groups", "ccp"), python)

    def test_torchrun_starts_a_cpp_program(self):
        result = lt.run(*torch_forks.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                        "--no-python", RANK, "init", timeout=120)
        ranks = sorted((json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")),
                       key=lambda out: out["rank"])
        self.assertEqual([(out["rank"], out["sum"], out["launcher"]) for out in ranks],
                         [(0, 3, "torchrun"), (1, 3, "torchrun")])

    def test_torchrun_starts_python_and_cpp_ranks(self):
        with lt.temporary_folder() as folder:
            script = folder / "rank.sh"
            script.write_text(f'#!/bin/sh\nif [ "$RANK" = 1 ]; then exec {shlex.join(torch_forks.python())} "{PEER}" init; fi\n'
                              f'exec "{RANK}" init\n')
            script.chmod(0o755)
            result = lt.run(*torch_forks.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                            "--no-python", script, timeout=120)
        sums = [json.loads(line)["sum"] for line in result.stdout.splitlines() if line.startswith("{")]
        self.assertEqual(sums, [3, 3])


class BadInput(unittest.TestCase):
    def test_a_taken_port(self):
        holder, port = held_port()
        with holder:
            holder.listen()
            result = lt.run(RANK, "init", check=False,
                            env=lt.clean_environment(**torchrun_variables(0, 2, port)))
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"127.0.0.1:{port}", result.stderr)
        self.assertIn("taken", result.stderr)

    def test_an_address_that_does_not_resolve(self):
        variables = torchrun_variables(1, 2, 1234, MASTER_ADDR="no-such-host.invalid", LOCKSTEP_TIMEOUT=1)
        started = time.monotonic()
        result = lt.run(RANK, "init", check=False, env=lt.clean_environment(**variables))
        self.assertEqual(result.returncode, 1)
        self.assertIn("no-such-host.invalid", result.stderr)
        self.assertLess(time.monotonic() - started, 20)

    def test_nobody_answers(self):
        holder, port = held_port()
        with holder:  # Bound, so nobody else can listen there, but not listening.
            variables = torchrun_variables(1, 2, port, LOCKSTEP_TIMEOUT=1)
            result = lt.run(RANK, "init", check=False, env=lt.clean_environment(**variables))
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"127.0.0.1:{port}", result.stderr)

    def test_a_missing_rank_is_named(self):
        results = run_ranks([[RANK, "init"], [RANK, "init"]],
                            lambda r, p: torchrun_variables(r, 3, p, LOCKSTEP_TIMEOUT=2))
        codes = [code for code, _, _ in results]
        self.assertEqual(codes, [1, 1])
        # A late one is named beside it.
        self.assertRegex("\n".join(err for _, _, err in results), r"ranks? [\d, and]*\b2\b.* did not come")

    def test_a_rank_given_twice(self):
        """One of the two is refused while the other goes on with the job."""
        for _ in range(5):
            port, job = free_port(), Job()
            for rank in (0, 1, 1):
                job.start([RANK, "hold"], stdin=subprocess.PIPE, **torchrun_variables(rank, 2, port))
            lt.wait_until(lambda: any(p.poll() is not None for p in job.processes), 60, "a refusal")
            refused = [p.poll() is not None for p in job.processes]
            results = job.finish()  # Ends their standard input.
            if not any("the port is taken" in err for _, _, err in results):
                break
        self.assertFalse(refused[0], results)
        self.assertEqual(sorted(code for code, _, _ in results), [0, 0, 2], results)
        self.assertEqual([code for (code, _, _), out in zip(results, refused) if out], [2], results)
        self.assertTrue(any("rank 1" in err and "two processes" in err for _, _, err in results))

    def test_usage_errors(self):
        for variables, said in (
            ({"RANK": 2, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}, "RANK=2"),
            ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": 1}, "MASTER_ADDR"),
            ({"WORLD_SIZE": 2}, "RANK is not set"),
            ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
              "SLURM_PROCID": 1, "SLURM_NTASKS": 4, "SLURM_STEP_ID": 0}, "SLURM_PROCID=1"),
            ({"LOCKSTEP_TIMEOUT": "soon"}, "LOCKSTEP_TIMEOUT='soon'"),
        ):
            with self.subTest(said):
                result = lt.run(RANK, "init", check=False, env=lt.clean_environment(**variables))
                self.assertEqual(result.returncode, 2)
                self.assertIn(said, result.stderr)

    def test_a_rank_that_fails_ends_the_job_at_once(self):
        started = time.monotonic()
        results = run_ranks([[RANK, "fail"]] * 2, lambda r, p: torchrun_variables(r, 2, p))
        self.assertLess(time.monotonic() - started, 30, "the time-out is 60 s")
        self.assertEqual([code for code, _, _ in results], [1, 1])
        self.assertIn("the data of rank 1 is damaged", results[1][2])
        self.assertIn("rank 1", results[0][2])

    def test_a_monitored_barrier_names_who_is_absent(self):
        results = run_ranks([[RANK, "absent"]] * 3, lambda r, p: torchrun_variables(r, 3, p))
        for rank in (0, 2):
            self.assertEqual(results[rank][0], 0, results[rank][2])
            self.assertIn("rank 1 did not come within 1.0s", results[rank][1]["error"])


if __name__ == "__main__":
    lt.main()
