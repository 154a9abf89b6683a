"""`lockstep::start`: what a program that catches nothing shows, and its exit code, when it is started by
hand and under each launcher."""

import contextlib
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import unittest

import lockstep_testing as t
import mpi_testing
import run_testing
import torch_forks

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
PROGRAM = t.BUILD_DIR / "tests" / "lockstep_start_program"
BACKENDS = ("shm", "gloo")


class Started(run_testing.InOwnSession):
    """The program, started by hand in a session of its own."""

    def __init__(self, task, *, ranks=2, stdin=subprocess.DEVNULL, **variables):
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-test.")
        self.out = pathlib.Path(self.folder.name)
        self.env, self.mark = run_testing.marked_environment(OUT=self.out, TEST_RANKS=ranks, **variables)
        self.process = subprocess.Popen([PROGRAM, task], env=self.env, stdin=stdin, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, start_new_session=True)

    def __exit__(self, *error):
        super().__exit__(*error)
        self.folder.cleanup()

    def wait_for_ranks(self, count=2):
        run_testing.wait_for_files(*(self.out / f"pid{rank}" for rank in range(count)))

    def pid_of(self, rank):
        return int((self.out / f"pid{rank}").read_text())

    def end(self, timeout=120):
        out, err = self.process.communicate(timeout=timeout)
        t.wait_until(lambda: not run_testing.processes_with(self.mark), timeout=10, what="the end of all processes")
        return self.exit_code(), out, err


def start(task, **options):
    """The program's exit code, standard output and standard error."""
    with Started(task, **options) as started:
        return started.end()


class Output(unittest.TestCase):
    def test_rank_0s_alone_is_shown(self):
        self.assertEqual(start("print"), (0, "rank 0 of 2\n", ""))

    def test_unless_asked_otherwise(self):
        code, out, err = start("print", TEST_STDOUT="01")
        self.assertEqual((code, sorted(out.splitlines()), err), (0, ["rank 0 of 2", "rank 1 of 2"], ""))
        self.assertEqual(start("print", TEST_STDOUT="1"), (0, "rank 1 of 2\n", ""))

    def test_no_such_rank(self):
        self.assertEqual(start("print", TEST_STDOUT="02"),
                         (2, "", "error: start: stdout_ranks has 2, which is no local rank\n"
                                 "  hint: local ranks go from 0 to 1\n"))

    def test_what_was_printed_before_comes_first(self):
        """By the process that was started by hand, and by rank 0, in which it runs again. The first one's statics end last."""
        self.assertEqual(start("print", TEST_BEFORE=1, TEST_STATIC=1),
                         (0, "before\nbefore\nrank 0 of 2\nstatics are gone\n", ""))

    def test_statics_after_a_failure(self):
        self.assertEqual(start("standard", TEST_STATIC=1),
                         (1, "statics are gone\n", "error: rank 1: the shelf fell\n"))

    def test_one_rank_is_this_process(self):
        self.assertEqual(start("print", ranks=1), (0, "rank 0 of 1\n", ""))
        with Started("input", ranks=1, stdin=subprocess.PIPE) as started:
            started.process.stdin.write("A")
            started.process.stdin.close()
            started.process.stdin = None
            self.assertEqual(started.end(), (0, f"read {ord('A')}\n", ""))

    def test_rank_0_has_the_standard_input(self):
        with Started("input", stdin=subprocess.PIPE) as started:
            started.process.stdin.write("A")
            started.process.stdin.close()
            started.process.stdin = None
            self.assertEqual(started.end(), (0, f"read {ord('A')}\n", ""))

    def test_wrong_number_of_processes(self):
        self.assertEqual(start("print", ranks=0), (2, "", "error: start of 0 processes\n  hint: at least 1\n"))
        self.assertEqual(start("print", ranks=-1)[0], 2)

    def test_a_mistyped_setting_is_told_once(self):
        code, out, err = start("print", LOCKSTEP_TIMEOUT="soon")
        self.assertEqual((code, out), (2, ""))
        self.assertRegex(err, r"^error: .*LOCKSTEP_TIMEOUT")
        self.assertEqual(err.count("LOCKSTEP_TIMEOUT"), 1, err)

    def test_an_unknown_backend(self):
        code, out, err = start("print", TEST_BACKEND="smoke")
        self.assertEqual((code, out), (2, ""))
        self.assertRegex(err, r"^error: rank [01]: .*'smoke'")
        self.assertEqual(err.count("error: "), 1, err)


class Failures(unittest.TestCase):
    """Rank 1 fails, rank 0 waits for it: rank 1's story is told, once and by the parent. The backends take turns: how rank 0
    learns of it depends on them, what is told does not."""

    turns = itertools.cycle(BACKENDS)

    def check(self, task, code, text, backend=None):
        backend = backend or next(self.turns)
        with self.subTest(backend=backend):
            self.assertEqual(start(task, TEST_BACKEND=backend), (code, "", text))

    def test_an_error_of_ours(self):
        for backend in BACKENDS:
            self.check("lockstep-error", 1, "error: rank 1: the loss is NaN\n  hint: take a smaller lr\n", backend)

    def test_its_exit_code_is_kept(self):
        self.check("usage", 2, "error: rank 1: no such colour\n")

    def test_an_orderly_interrupt(self):
        self.check("interrupted", 143, "error: rank 1: stopped by SIGTERM\n")
        self.assertEqual(start("interrupted", ranks=1), (143, "", "stopped by SIGTERM\n"))

    def test_a_standard_exception(self):
        self.check("standard", 1, "error: rank 1: the shelf fell\n")

    def test_an_error_of_libtorch_without_its_stack(self):
        self.check("c10", 1, "error: rank 1: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)\n")

    def test_any_type(self):
        self.check("number", 1, "error: rank 1: an exception of unknown type\n")

    def test_out_of_memory(self):
        self.check("memory", 1, "error: rank 1: out of memory\n")

    def test_in_a_destructor(self):
        self.check("destructor", 1, "error: rank 1: the shelf fell\n")

    def test_in_another_thread(self):
        self.check("thread", 1, "error: rank 1: the shelf fell\n")

    def test_in_several_threads_at_once(self):
        self.check("two-threads", 1, "error: rank 1: the shelf fell\n")
        self.assertEqual(start("two-threads", ranks=1), (1, "", "error: the shelf fell\n"))

    def test_a_thread_that_was_not_joined(self):
        self.check("unjoined", 1, "error: rank 1: std::terminate was called without an exception\n"
                                  "  hint: a std::thread that is destroyed before join() or detach() does that\n")

    def test_started_twice(self):
        self.check("twice", 2, "error: rank 1: start was called in a process that start or ElasticJob has made a rank already\n"
                               "  hint: call it once, at the beginning of main; World::new_group makes further groups\n")

    def test_spawn_after_start(self):
        code, _, err = start("spawn")
        self.assertEqual(code, 2)
        self.assertRegex(err, r"^error: rank 1: spawn was called in a process that is itself a spawned rank \(RANK=1\)\n")

    def test_what_stdio_holds_is_written(self):
        """Rank 0 of one: whose standard output is shown."""
        for ranks in (1, 2):
            code, out, err = start("buffered", ranks=ranks, TEST_STDOUT=str(ranks - 1))
            self.assertEqual((code, out), (1, "half a line"))
            self.assertEqual(err, "error: the shelf fell\n" if ranks == 1 else "error: rank 1: the shelf fell\n")

    def test_missing_data_on_all_ranks_is_told_once(self):
        code, out, err = start("missing-data")
        self.assertEqual((code, out), (1, ""))
        self.assertRegex(err, r"^error: rank [01]: .*/nowhere")
        self.assertEqual(err.count("error: "), 1, err)
        self.assertNotIn("terminate", err)

    def test_a_rank_that_is_killed(self):
        code, _, err = start("killed", TEST_BACKEND=next(self.turns))
        self.assertEqual(code, 128 + signal.SIGKILL)
        self.assertRegex(err, r"^error: rank 1 \(pid \d+\) was killed by SIGKILL \(signal 9\)\n$")

    def test_a_rank_that_exits(self):
        code, _, err = start("exit")
        self.assertEqual(code, 5)
        self.assertRegex(err, r"^error: rank 1 \(pid \d+\) exited with code 5\n$")

    def test_a_program_that_catches(self):
        """Each rank says what it likes; the parent adds which one was the first."""
        code, _, err = start("catch")
        self.assertEqual(code, 3)
        self.assertIn("caught: no more data\n", err)
        self.assertRegex(err, r"\nerror: rank 1 \(pid \d+\) exited with code 3\n")

    def test_the_programs_own_handler(self):
        code, _, err = start("standard", TEST_HANDLER=1)
        self.assertEqual(code, 7)
        self.assertIn("the program's own handler\n", err)
        self.assertIn("error: rank 1: the shelf fell\n", err)
        self.assertEqual(start("standard", ranks=1, TEST_HANDLER=1), (7, "", "the program's own handler\n"))

    def test_alone(self):
        """A world of one has no rank to name."""
        self.assertEqual(start("standard", ranks=1), (1, "", "error: the shelf fell\n"))


class Signals(unittest.TestCase):
    def check(self, number, code, name, *backends):
        for backend in BACKENDS if LONG else backends:
            with self.subTest(backend=backend), Started("wait", TEST_BACKEND=backend) as started:
                started.wait_for_ranks()
                started.process.send_signal(number)
                self.assertEqual(started.end(), (code, "", f"stopped by {name}\n"))

    def test_ctrl_c(self):
        self.check(signal.SIGINT, 130, "SIGINT", "shm")

    def test_term(self):
        self.check(signal.SIGTERM, 143, "SIGTERM", "gloo")

    def test_nothing_outlives_a_parent_that_is_killed(self):
        with Started("wait") as started:
            started.wait_for_ranks()
            started.process.kill()
            self.assertEqual(started.end()[0], 137)

    def test_a_lost_rank(self):
        with Started("wait") as started:
            started.wait_for_ranks()
            os.kill(started.pid_of(0), signal.SIGKILL)
            code, out, err = started.end()
        self.assertEqual((code, out), (137, ""))
        self.assertRegex(err, r"^error: rank 0 \(pid \d+\) was killed by SIGKILL \(signal 9\)\n$")


class Seeds(unittest.TestCase):
    def numbers(self, **variables):
        """What each rank draws: from the default generator, and from its own."""
        code, out, err = start("numbers", TEST_STDOUT="01", **variables)
        self.assertEqual((code, err), (0, ""))
        lines = dict(line.split(" ", 1) for line in out.splitlines())
        return [lines[rank].removeprefix("all ").split(" own ") for rank in "01"]

    def test_seeded(self):
        """Alike on all ranks, and each rank's own generator gives other numbers; the same in each run."""
        (all0, own0), (all1, own1) = first = self.numbers(TEST_SEED=7)
        self.assertEqual(all0, all1)
        self.assertEqual(len({all0, own0, own1}), 3)
        self.assertEqual(self.numbers(TEST_SEED=7), first)
        other = self.numbers(TEST_SEED=8)
        self.assertNotEqual(other[0][0], all0)
        self.assertFalse({own for _, own in other} & {own0, own1})

    def test_unseeded(self):
        """Each rank draws other numbers."""
        (all0, own0), (all1, own1) = self.numbers()
        self.assertEqual(len({all0, own0, all1, own1}), 4)

    def test_rank_0s_seed_counts(self):
        (all0, own0), (all1, own1) = self.numbers(TEST_SEED="clock")
        self.assertEqual(all0, all1)
        self.assertNotEqual(own0, own1)

    def test_a_seed_on_one_rank_only(self):
        code, _, err = start("numbers", TEST_SEED="one-sided")
        self.assertEqual((code, err), (2, "error: rank 1: start: this rank has a seed, but rank 0 has none\n"
                                          "  hint: give all ranks the same StartOptions\n"))


class Launchers(unittest.TestCase):
    """This process is a rank already: `start` starts none."""

    def test_lockstep_run(self):
        code, out, err = run_testing.lockstep_run("--nproc-per-node", 3, PROGRAM, "print")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(sorted(out.splitlines()), [f"[rank{i}]: rank {i} of 3" for i in range(3)])

    def test_a_failure_under_lockstep_run(self):
        """The rank says it, the launcher names the rank; the others lost it, and say nothing."""
        for task, text in (("standard", "the shelf fell"), ("thread", "the shelf fell"))[:1 + LONG]:
            code, _, err = run_testing.lockstep_run("--nproc-per-node", 3, PROGRAM, task)
            self.assertEqual(code, 1)
            self.assertRegex(err, rf"^\[rank2\]: error: rank 2: {text}\n"
                                  r"lockstep run: error: rank 2 \(pid \d+\) exited with code 1\n$")

    def test_ranks_that_lost_one_are_told_of_once(self):
        """The lost one ends with 0, so that no launcher ends the others: each finds out by itself."""
        lost = r"rank [01](: barrier| called barrier|: forming the group).* rank 2 \(process \d+\) has ended"
        code, _, err = run_testing.lockstep_run("--nproc-per-node", 3, PROGRAM, "vanishes")
        self.assertEqual(code, 1)
        self.assertRegex(err, r"^lockstep run: error: rank [01] \(pid \d+\) exited with code 1\n  it reported:\n    " + lost)
        self.assertEqual(err.count("has ended"), 1, err)
        code, _, err = start("vanishes", ranks=3)
        self.assertEqual((code, err.count("has ended")), (1, 1), err)
        self.assertRegex(err, "^error: " + lost)

    def test_ctrl_c_under_lockstep_run(self):
        with t.temporary_folder() as folder:
            with run_testing.Launched("--nproc-per-node", 2, PROGRAM, "wait", env={"OUT": str(folder)}) as launched:
                run_testing.wait_for_files(folder / "pid0", folder / "pid1")
                launched.send(signal.SIGINT)
                self.assertEqual(launched.end(), (130, "", "lockstep run: stopped by SIGINT\n"))

    @unittest.skipUnless(t.torch_is_the_linked_one(), "this Python's torch is not the LibTorch that is linked")
    def test_torchrun(self):
        torchrun = (*torch_forks.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--no-python",
                    PROGRAM)
        self.assertEqual(sorted(t.run(*torchrun, "print").stdout.splitlines()), ["rank 0 of 2", "rank 1 of 2"])
        result = t.run(*torchrun, "standard", check=False)
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stderr.count("error: rank 1: the shelf fell\n"), 1, result.stderr)
        self.assertNotIn("terminate called", result.stderr)

    def test_mpirun(self):
        reason = mpi_testing.missing()
        if reason:
            self.skipTest(reason)
        code, out, err = mpi_testing.mpirun(2, PROGRAM, "print")
        self.assertEqual((code, sorted(out.splitlines())), (0, ["rank 0 of 2", "rank 1 of 2"]), err)
        code, _, err = mpi_testing.mpirun(2, PROGRAM, "standard")
        self.assertEqual(code, 1)
        self.assertEqual(err.count("error: rank 1: the shelf fell\n"), 1, err)
        self.assertNotIn("terminate called", err)
        if mpi_testing.lockstep_has_mpi():
            code, _, err = mpi_testing.mpirun(2, PROGRAM, "standard", env={"TEST_BACKEND": "mpi"})
            self.assertEqual((code, err.count("error: rank 1: the shelf fell\n")), (1, 1), err)

    @contextlib.contextmanager
    def tasks(self, task, **variables):
        """Two tasks of a step, with the variables that srun gives them."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(Started(
                task, SLURM_PROCID=i, SLURM_NTASKS=2, SLURM_LOCALID=i, SLURM_NODEID=0, SLURM_NNODES=1, SLURM_STEP_ID=0,
                SLURM_JOB_ID=os.getpid(), **variables)) for i in range(2)]

    def test_srun(self):
        with self.tasks("print") as ranks:
            self.assertEqual([rank.end() for rank in ranks], [(0, "rank 0 of 2\n", ""), (0, "rank 1 of 2\n", "")])

    def test_a_lost_peer_that_nobody_else_tells_of(self):
        for backend in BACKENDS:
            with self.subTest(backend=backend), self.tasks("wait", TEST_BACKEND=backend) as ranks:
                for i, rank in enumerate(ranks):
                    run_testing.wait_for_files(rank.out / f"pid{i}")
                ranks[1].process.kill()
                code, out, err = ranks[0].end()
                self.assertEqual((code, out), (1, ""))
                self.assertRegex(err, r"^error: rank 0(: barrier| called barrier|: forming the group).* rank 1 \(process \d+\) has ended")
                self.assertEqual(err.count("error: "), 1, err)
                self.assertNotIn("frame #", err)

    def test_a_rank_that_never_comes(self):
        with self.tasks("print", LOCKSTEP_TIMEOUT=1) as ranks:
            ranks[1].process.kill()
            code, _, err = ranks[0].end()
        self.assertEqual(code, 1)
        self.assertRegex(err, r"^error: rank 0: init: of 2 ranks, rank 1 did not come within 1\.0s \(timed out\)\n  hint: ")

    def test_hosts_that_start_their_ranks_themselves(self):
        """Each shows what its first rank prints."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with contextlib.ExitStack() as stack:
            hosts = [stack.enter_context(Started("print", ranks=1, TEST_FIRST=i, TEST_WORLD=2, MASTER_ADDR="127.0.0.1",
                                                 MASTER_PORT=port)) for i in range(2)]
            self.assertEqual([host.end() for host in hosts], [(0, "rank 0 of 2\n", ""), (0, "rank 1 of 2\n", "")])


if __name__ == "__main__":
    t.main()
