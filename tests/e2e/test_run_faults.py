"""`lockstep run` when something fails, is signalled or is killed: nothing outlives it, it ends soon,
its exit code and last words tell why."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import unittest

from lockstep_testing import main, temporary_folder, wait_until
from run_testing import CPP_RANK, Launched, alive, lockstep_run, processes_with, seconds, wait_for_files

# Leaves a daemon that has forked twice, changed session and forgotten its environment.
DAEMON = ("(setsid env -i PATH=$PATH sh -c 'echo $$ > '$OUT'/daemon$0.tmp; "
          "mv '$OUT'/daemon$0.tmp '$OUT'/daemon$0; exec sleep 1000' $RANK &); ")
STUBBORN = "trap '' TERM INT HUP; echo $$ > $OUT/pid$RANK; while :; do sleep 1; done"


def number_in(path):
    return int(pathlib.Path(path).read_text())


class Failures(unittest.TestCase):
    def test_the_cause_is_last_and_the_code_is_the_workers(self):
        begin = time.monotonic()
        code, out, err = lockstep_run("--nproc-per-node", 3, "sh", "-c",
                                      "echo working; [ $RANK = 1 ] && { echo a; echo reason >&2; exit 42; }; sleep 1000")
        self.assertLess(seconds(begin), 20)
        self.assertEqual(code, 42)
        self.assertRegex(err, r"lockstep run: error: rank 1 \(pid \d+\) exited with code 42\n"
                              r"  its last lines of standard error:\n    reason\n$")
        self.assertEqual(err.count("lockstep run: error"), 1)

    def test_a_signal_death(self):
        for name, number in (("SEGV", 11), ("KILL", 9), ("ABRT", 6)):
            code, _, err = lockstep_run("--nproc-per-node", 2, "sh", "-c",
                                        f"[ $RANK = 1 ] && kill -{name} $$; sleep 1000")
            self.assertEqual(code, 128 + number)
            self.assertRegex(err, rf"rank 1 \(pid \d+\) was killed by SIG{name} \(signal {number}\)\n$")

    def test_others_that_ignore_term_are_gone_within_a_second(self):
        with temporary_folder() as folder:
            wait = "until [ -e $OUT/pid0 ] && [ -e $OUT/pid2 ]; do sleep 0.01; done; date +%s.%N > $OUT/t; exit 5"
            code, _, err = lockstep_run("--nproc-per-node", 3, "sh", "-c", f"[ $RANK = 1 ] && {{ {wait}; }}; {STUBBORN}",
                                        env={"OUT": str(folder)})
            ended = time.time()
            self.assertEqual(code, 5, err)
            # 0.8 s of grace; the rest is this machine's own business.
            self.assertLess(ended - float((folder / "t").read_text()), 1.0 + 3.0)
            self.assertFalse(alive(number_in(folder / "pid0")) or alive(number_in(folder / "pid2")))

    def test_the_grace_is_settable(self):
        with temporary_folder() as folder:
            clean = "trap 'echo clean > $OUT/clean; exit 0' TERM; touch $OUT/up; while :; do sleep 0.01; done"
            code, _, err = lockstep_run(
                "--nproc-per-node", 2, "--shutdown-timeout", 20, "sh", "-c",
                f"[ $RANK = 0 ] && {{ until [ -e $OUT/up ]; do sleep 0.01; done; exit 1; }}; {clean}",
                env={"OUT": str(folder)})
            self.assertEqual((code, (folder / "clean").read_text()), (1, "clean\n"), err)

    def test_only_the_last_lines_are_repeated(self):
        _, _, err = lockstep_run("sh", "-c", "for i in $(seq 100); do echo line$i >&2; done; exit 1")
        last = err[err.index("lockstep run: error"):]
        self.assertIn("    line100\n", last)
        self.assertNotIn("line80\n", last)

    def test_pythons_error_file(self):
        program = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("seven")
main()
"""
        with temporary_folder() as folder:
            (folder / "fail.py").write_text(program)
            code, _, err = lockstep_run(folder / "fail.py", env={"PYTHON_EXEC": sys.executable}, timeout=120)
            if "No module named 'torch'" in err:
                self.skipTest("this Python has no torch")
            self.assertEqual(code, 1)
            self.assertIn("ValueError: seven", err[err.index("lockstep run: error"):])

    def test_the_rank_that_threw_is_the_cause_not_the_one_that_waited(self):
        if not CPP_RANK.exists():
            self.skipTest(f"{CPP_RANK} is not built")
        code, _, err = lockstep_run("--nproc-per-node", 2, CPP_RANK, "fail", timeout=120)
        self.assertNotEqual(code, 0)
        self.assertIn("lockstep run: error: rank 1 ", err)

    def test_what_a_worker_leaves_behind_ends_with_the_job(self):
        with temporary_folder() as folder:
            code, _, err = lockstep_run("--nproc-per-node", 2, "sh", "-c",
                                        DAEMON + "until [ -s $OUT/daemon$RANK ]; do sleep 0.01; done",
                                        env={"OUT": str(folder)})
            self.assertEqual(code, 0, err)
            for rank in (0, 1):
                self.assertFalse(alive(number_in(folder / f"daemon{rank}")))


class Signals(unittest.TestCase):
    def test_each_is_forwarded_and_never_ends_in_success(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            with self.subTest(signal=number.name), temporary_folder() as folder:
                name = number.name[3:]
                text = f"trap 'echo {name} > $OUT/got$RANK; exit 0' {name}; echo x > $OUT/up$RANK; " \
                       "while :; do sleep 0.01; done"
                with Launched("--nproc-per-node", 2, "sh", "-c", text, env={"OUT": str(folder)}) as launched:
                    wait_for_files(folder / "up0", folder / "up1")
                    launched.send(number)
                    code, _, err = launched.end()
                    self.assertEqual(code, 128 + number, err)
                    self.assertIn(f"stopped by {number.name}", err.splitlines()[-1])
                    for rank in (0, 1):
                        self.assertEqual((folder / f"got{rank}").read_text(), f"{name}\n")
                    launched.nothing_left()

    def test_a_second_one_ends_workers_that_do_not_listen(self):
        with temporary_folder() as folder:
            with Launched("--nproc-per-node", 2, "sh", "-c", STUBBORN, env={"OUT": str(folder)}) as launched:
                wait_for_files(folder / "pid0", folder / "pid1")
                begin = time.monotonic()
                while launched.process.poll() is None and seconds(begin) < 20:
                    launched.send(signal.SIGINT)
                    time.sleep(0.1)
                self.assertLess(seconds(begin), 20)
                self.assertEqual(launched.end()[0], 130)
                launched.nothing_left()

    def test_others_are_forwarded_when_named(self):
        with temporary_folder() as folder:
            text = "trap 'echo usr1; exit 0' USR1; echo x > $OUT/up; while :; do sleep 0.01; done"
            with Launched("--signals-to-handle", "SIGTERM,SIGUSR1", "sh", "-c", text,
                          env={"OUT": str(folder)}) as launched:
                wait_for_files(folder / "up")
                launched.send(signal.SIGUSR1)
                code, out, _ = launched.end()
                self.assertEqual((code, out), (128 + signal.SIGUSR1, "[rank0]: usr1\n"))

    def test_at_any_moment(self):
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed {seed}", file=sys.stderr)
        source = random.Random(seed)
        for attempt in range(15):
            number = source.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
            with temporary_folder() as folder, \
                    Launched("--nproc-per-node", 2, "sh", "-c", DAEMON + "sleep 1000",
                             env={"OUT": str(folder), "TMPDIR": str(folder)}) as launched:
                time.sleep(source.random() * 0.5)
                launched.send(number)
                code, _, err = launched.end()
                self.assertEqual(code, 128 + number, f"seed {seed} attempt {attempt}: {err}")
                launched.nothing_left()
                # Before it handles signals one may end it on the spot; later it cleans up.
                if launched.process.returncode > 0:
                    self.assertEqual([p for p in folder.iterdir() if p.name.startswith("lockstep")], [])
                for daemon in folder.glob("daemon?"):
                    wait_until(lambda: not alive(number_in(daemon)), 10, f"the end of {daemon}")

    def test_a_closed_pipe(self):
        with temporary_folder() as folder:
            with Launched("--nproc-per-node", 2, "sh", "-c", "while :; do echo y; done",
                          env={"OUT": str(folder)}) as launched:
                self.assertTrue(launched.process.stdout.readline().startswith(b"[rank"))
                launched.process.stdout.close()
                launched.process.stdout = None
                err = launched.process.stderr.read().decode()
                self.assertEqual(launched.process.wait(30), 128 + signal.SIGPIPE)
                self.assertIn("SIGPIPE", err)
                launched.nothing_left()

    def test_a_full_disk(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full here")
        with open("/dev/full", "wb") as full, Launched("sh", "-c", "echo x; sleep 1000", stdout=full) as launched:
            code, _, err = launched.end()
            self.assertEqual(code, 1)
            self.assertIn("No space left", err)
            launched.nothing_left()

    def test_a_reader_that_is_slow_loses_nothing(self):
        with Launched("--nproc-per-node", 2, "sh", "-c", "seq 100000; echo end") as launched:
            begin = b"".join(os.read(launched.process.stdout.fileno(), 100) for _ in range(2000))
            code, out, err = launched.end(60)
            self.assertEqual((code, begin.count(b"\n") + out.count("\n")), (0, 200002), err)


class Killed(unittest.TestCase):
    def start(self, folder):
        launched = Launched("--nproc-per-node", 2, "sh", "-c", DAEMON + STUBBORN,
                            env={"OUT": str(folder), "TMPDIR": str(folder)})
        wait_for_files(*(folder / f"{name}{rank}" for name in ("pid", "daemon") for rank in (0, 1)))
        return launched

    def all_gone(self, folder):
        for name in ("pid", "daemon"):
            for rank in (0, 1):
                pid = number_in(folder / f"{name}{rank}")
                wait_until(lambda: not alive(pid), 10, f"the end of {name}{rank}")

    def test_the_launcher(self):
        with temporary_folder() as folder, self.start(folder) as launched:
            launched.send(signal.SIGKILL)
            launched.process.wait()
            self.all_gone(folder)
            launched.nothing_left()
            wait_until(lambda: not list(folder.glob("lockstep*")), 10, "the end of the temporary folder")

    def test_the_launchers_whole_process_group(self):
        with temporary_folder() as folder, self.start(folder) as launched:
            os.killpg(launched.process.pid, signal.SIGKILL)
            launched.process.wait()
            self.all_gone(folder)
            launched.nothing_left()

    def test_the_keeper(self):
        with temporary_folder() as folder, self.start(folder) as launched:
            keepers = [pid for pid, line in processes_with(launched.mark) if line.startswith(b"keeper\0")]
            self.assertEqual(len(keepers), 1)
            os.kill(keepers[0], signal.SIGKILL)
            code, _, err = launched.end()
            self.assertEqual(code, 1)
            self.assertIn("keeps the workers was killed", err)
            self.all_gone(folder)
            launched.nothing_left()

    def test_one_worker(self):
        with temporary_folder() as folder, self.start(folder) as launched:
            os.kill(number_in(folder / "pid1"), signal.SIGKILL)
            code, _, err = launched.end()
            self.assertEqual(code, 137)
            self.assertIn("rank 1", err)
            self.all_gone(folder)
            launched.nothing_left()

    def test_the_launcher_at_any_moment(self):
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed {seed}", file=sys.stderr)
        source = random.Random(seed)
        for attempt in range(15):
            with temporary_folder() as folder, \
                    Launched("--nproc-per-node", 2, "sh", "-c", DAEMON + "sleep 1000", stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL, env={"OUT": str(folder)}) as launched:
                time.sleep(source.random() * 0.3)
                launched.send(signal.SIGKILL)
                launched.process.wait()
                launched.nothing_left()
                for daemon in folder.glob("daemon?"):
                    wait_until(lambda: not alive(number_in(daemon)), 10,
                               f"seed {seed} attempt {attempt}: the end of {daemon}")


if __name__ == "__main__":
    main()
