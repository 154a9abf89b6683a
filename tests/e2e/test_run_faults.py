"""`lockstep run` when something fails, is signalled or is killed: nothing outlives it, it ends soon,
its exit code and last words tell why."""

import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest

from lockstep_testing import main, temporary_folder, wait_until
from run_testing import CPP_RANK, Launched, OtherProgram, alive, lockstep_run, name_of, processes_with, seconds, wait_for_files

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")

# Leaves a daemon that has forked twice, changed session and forgotten its environment.
DAEMON = ("(setsid env -i PATH=$PATH sh -c 'echo $$ > '$OUT'/daemon$0.tmp; "
          "mv '$OUT'/daemon$0.tmp '$OUT'/daemon$0; exec sleep 1000' $RANK &); ")
STUBBORN = "trap '' TERM INT HUP; echo $$ > $OUT/pid$RANK; while :; do sleep 1; done"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def number_in(path):
    return int(pathlib.Path(path).read_text())


class Failures(unittest.TestCase):
    def test_the_cause_is_last_and_the_code_is_the_workers(self):
        begin = time.monotonic()
        code, out, err = lockstep_run("--nproc-per-node", 3, "sh", "-c",
                                      "echo working; [ $RANK = 1 ] && { echo a; echo reason >&2; exit 42; }; sleep 1000")
        self.assertLess(seconds(begin), 20)
        self.assertEqual(code, 42)
        self.assertRegex(err, r"\[rank1\]: reason\nlockstep run: error: rank 1 \(pid \d+\) exited with code 42\n$")
        self.assertEqual(err.count("lockstep run: error"), 1)

    def test_last_words_that_others_have_covered_are_repeated(self):
        with temporary_folder() as folder:
            text = ("[ $RANK = 0 ] && { echo reason >&2; touch $OUT/said; until [ -e $OUT/after ]; do sleep 0.01; done; exit 42; }; "
                    "until [ -e $OUT/said ]; do sleep 0.01; done; echo after >&2; touch $OUT/after; sleep 1000")
            code, _, err = lockstep_run("--nproc-per-node", 2, "sh", "-c", text, env={"OUT": str(folder)})
        self.assertEqual(code, 42)
        self.assertRegex(err, r"lockstep run: error: rank 0 \(pid \d+\) exited with code 42\n"
                              r"  its last lines of standard error:\n    reason\n$")

    def test_a_signal_death(self):
        for name, number in (("SEGV", 11), ("KILL", 9), ("ABRT", 6)):
            code, _, err = lockstep_run("--nproc-per-node", 2, "sh", "-c",
                                        f"[ $RANK = 1 ] && kill -{name} $$; sleep 1000")
            self.assertEqual(code, 128 + number)
            self.assertRegex(err, rf"rank 1 \(pid \d+\) was killed by SIG{name} \(signal {number}\)\n  hint: .*--max-restarts.*\n$")

    def test_a_death_at_the_memory_limit_is_named(self):
        """In a real cgroup of version 1 or 2, where this user may make one."""
        root = pathlib.Path("/sys/fs/cgroup")
        group = name = None
        for folder, file in ((root / "memory", "memory.limit_in_bytes"), (root, "memory.max")):
            group, name = folder / f"lockstep-test-{os.getpid()}", file
            try:
                group.mkdir()
            except OSError:
                continue
            if (group / file).exists():
                break
            group.rmdir()
        else:
            self.skipTest("no cgroup with a memory limit can be made here")
        self.addCleanup(group.rmdir)
        (group / name).write_text(str(150 << 20))
        fill = "import os\nif os.environ['RANK'] == '1': kept = b'x' * (1 << 30)\nelse: import signal; signal.pause()"
        with Launched("--nproc-per-node", 2, sys.executable, "-c", fill,
                      preexec_fn=lambda: (group / "cgroup.procs").write_text("0")) as launched:
            code, _, err = launched.end(60)
            launched.nothing_left()
        self.assertEqual(code, 128 + signal.SIGKILL, err)
        self.assertRegex(err, r"rank 1 \(pid \d+\) was killed by SIGKILL .*157 MB")
        self.assertNotIn("--max-restarts", err)

    def seconds_to_end(self, folder):
        """From the end of rank 1 to that of a job whose other ranks ignore TERM."""
        wait = "until [ -e $OUT/pid0 ] && [ -e $OUT/pid2 ]; do sleep 0.01; done; date +%s.%N > $OUT/t; exit 5"
        with Launched("--nproc-per-node", 3, "sh", "-c", f"[ $RANK = 1 ] && {{ {wait}; }}; {STUBBORN}",
                      env={"OUT": str(folder)}) as launched:
            launched.process.wait(20)
            ended = time.time()
            code, _, err = launched.end()
        self.assertEqual(code, 5, err)
        self.assertFalse(alive(number_in(folder / "pid0")) or alive(number_in(folder / "pid2")))
        return ended - float((folder / "t").read_text())

    def test_others_that_ignore_term_are_killed_after_the_grace(self):
        with temporary_folder() as folder:
            took = self.seconds_to_end(folder)
        self.assertGreater(took, 0.7, "the grace is 0.8 s")
        self.assertLess(took, 10, "after a signal it is 30 s")

    def test_the_grace_is_settable(self):
        self.end_within_the_grace("--shutdown-timeout", 20)
        self.end_within_the_grace(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="20")

    def end_within_the_grace(self, *flags, **variables):
        """The other rank needs a second to end; it has that when the grace is longer."""
        with temporary_folder() as folder:
            clean = "trap 'sleep 1; echo clean > $OUT/clean; exit 0' TERM; touch $OUT/up; while :; do sleep 0.01; done"
            code, _, err = lockstep_run(
                "--nproc-per-node", 2, *flags, "sh", "-c",
                f"[ $RANK = 0 ] && {{ until [ -e $OUT/up ]; do sleep 0.01; done; exit 1; }}; {clean}",
                env={"OUT": str(folder), **variables})
            self.assertEqual((code, (folder / "clean").read_text()), (1, "clean\n"), err)

    def test_only_the_last_lines_are_repeated(self):
        _, _, err = lockstep_run("--redirects", 2, "--log-dir", "/dev/null", "sh", "-c",
                                 "for i in $(seq 100); do echo line$i >&2; done; exit 1")
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
            self.assertEqual(err.count("ValueError: seven"), 1, "shown, so not repeated")
            code, _, err = lockstep_run("--redirects", 2, "--log-dir", "/dev/null", folder / "fail.py",
                                        env={"PYTHON_EXEC": sys.executable}, timeout=120)
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


class Passage:
    """A port that leads to another one of this machine, until it is cut."""

    def __init__(self, target):
        self.target, self.port, self.sockets = target, 0, []
        self.open()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cut()

    def open(self):
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, args=(self.listener,), daemon=True).start()

    def accept(self, listener):
        try:
            while True:
                near = listener.accept()[0]
                self.sockets.append(near)
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # The launcher that listens there is not up yet.
                    near.close()
                    continue
                self.sockets.append(far)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self.pump, args=pair, daemon=True).start()
        except OSError:
            pass  # It was cut.

    def pump(self, source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def cut(self):
        for one in (self.listener, *self.sockets):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            one.close()
        self.sockets = []


class Hosts(unittest.TestCase):
    """Two launchers on one machine that are two hosts; the ranks know nothing of each other."""

    def pair(self, folder, text, **flags):
        """Both launchers, once all four ranks have begun; `text` is run by each rank."""
        for _ in range(5):  # A free port may be taken before the launcher binds it.
            port = free_port()
            begun = "echo $$ > $OUT/pid$RANK.tmp; mv $OUT/pid$RANK.tmp $OUT/pid$RANK; "
            launched = [Launched("--nnodes", 2, "--node-rank", host, "--nproc-per-node", 2, "--master-addr", "127.0.0.1",
                                 "--master-port", port, *flags.get("flags", []), "sh", "-c", begun + text, env={"OUT": str(folder)})
                        for host in (0, 1)]
            self.addCleanup(lambda launched=launched: [one.__exit__() for one in launched])
            wait_until(lambda: all((folder / f"pid{rank}").exists() for rank in (2, 3)), 30, "the ranks of host 1")
            if launched[0].process.poll() is None:
                wait_until(lambda: all((folder / f"pid{rank}").exists() for rank in (0, 1)) or launched[0].process.poll() is not None,
                           30, "the ranks of host 0")
            if launched[0].process.poll() is None:
                return launched
        self.fail("no free port in five attempts")

    def launch(self, host, port, text, folder, env=None, **popen):
        return Launched("--nnodes", 2, "--node-rank", host, "--nproc-per-node", 2, "--master-addr", "127.0.0.1",
                        "--master-port", port, "sh", "-c", text, env={"OUT": str(folder), **(env or {})}, **popen)

    def test_a_host_that_waits_for_host_0_says_so(self):
        port = free_port()
        with temporary_folder() as folder, open(folder / "said", "wb") as said, \
                self.launch(1, port, "touch $OUT/started", folder, env={"TMPDIR": str(folder)}, stderr=said) as second:
            wait_until(lambda: "waiting for 2 hosts" in (folder / "said").read_text(), 20, "the wait for host 0")
            self.assertIn(f"host 0 at 127.0.0.1:{port}", (folder / "said").read_text())
            # Nobody would remove a folder, should the launcher be killed now.
            self.assertEqual([path.name for path in folder.iterdir()], ["said"])
            second.send(signal.SIGINT)
            self.assertEqual(second.end()[0], 128 + signal.SIGINT)

    def test_another_program_at_host_0s_port_is_told(self):
        """ssh and a web server end the job at once; who hangs up may be a proxy before host 0, so it is told only."""
        for banner, ends in ((b"SSH-2.0-OpenSSH_9.2p1\r\n", True), (b"HTTP/1.0 501 Unsupported method\r\n\r\n", True), (b"", False)):
            with self.subTest(banner), OtherProgram(banner) as server, temporary_folder() as folder, open(folder / "said", "wb") as said, \
                    self.launch(1, server.port, "true", folder, stderr=said) as host:
                def heard(folder=folder):
                    return (folder / "said").read_text()

                if ends:
                    self.assertEqual(host.end()[0], 1)
                    self.assertIn(banner.decode().split("\r")[0], heard())
                    self.assertNotIn("etcd", heard())
                else:
                    wait_until(lambda: "another program" in heard(), 30, "a word on who hangs up")
                    host.send(signal.SIGINT)
                    self.assertEqual(host.end()[0], 128 + signal.SIGINT)

    def test_a_broken_connection_between_the_launchers_is_made_again(self):
        for _ in range(5):
            port, text = free_port(), "touch $OUT/up$RANK; until [ -e $OUT/go ]; do sleep 0.01; done"
            with temporary_folder() as folder, Passage(port) as passage, self.launch(0, port, text, folder) as first, \
                    self.launch(1, passage.port, text, folder) as second:
                wait_until(lambda: (folder / "up3").exists() or first.process.poll() is not None, 30, "the ranks of host 1")
                passage.cut()
                passage.open()
                (folder / "go").touch()
                code, _, err = first.end()
                if "in use" in err:
                    continue
                self.assertEqual((code, second.end()[0]), (0, 0), err)
                return
        self.fail("no free port in five attempts")

    def killed(self, rank, text="sleep 1000"):
        """Kills a rank of two hosts with -9: the ends of both launchers, and the seconds that each took."""
        with temporary_folder() as folder:
            launched = self.pair(folder, text)
            os.kill(number_in(folder / f"pid{rank}"), signal.SIGKILL)
            begin, took = time.monotonic(), [None, None]

            def all_ended():
                for host, one in enumerate(launched):
                    if took[host] is None and one.process.poll() is not None:
                        took[host] = seconds(begin)
                return None not in took
            wait_until(all_ended, 20, "the end of both launchers")
            ends = [one.end() for one in launched]
            for one in launched:
                one.nothing_left()
            return ends, took

    def test_a_killed_rank_ends_the_job_on_both_at_once_and_is_named(self):
        for rank in (3, 0):
            with self.subTest(rank=rank):
                took = []
                for _ in range(4):  # The first may be slowed by the machine's other work.
                    ends, times = self.killed(rank)
                    own, other = ends[rank // 2], ends[1 - rank // 2]
                    self.assertEqual((own[0], other[0]), (137, 137), ends)
                    said = rf"rank {rank} (\(local rank \d\) )?\(pid \d+\) was killed by SIGKILL \(signal 9\)\n(  hint: .*\n)?$"
                    self.assertRegex(own[2], rf"lockstep run: error: on host {rank // 2}: " + said)
                    self.assertRegex(other[2], rf"lockstep run: error: on host {rank // 2}: " + said)
                    took.append(max(times))
                    if took[-1] < 2.0:
                        break
                self.assertLess(min(took), 2.0, took)

    def test_a_rank_that_lost_its_peer_is_not_taken_for_the_cause(self):
        # The ranks of host 0 say what Gloo says when a peer is gone, at the same moment.
        with temporary_folder() as folder:
            text = ("if [ $RANK -lt 2 ]; then until [ -e $OUT/lost ]; do sleep 0.01; done; "
                    "echo 'Connection closed by peer [10.0.0.2]' >&2; exit 1; fi; "
                    "[ $RANK = 3 ] && { until [ -e $OUT/pid0 ]; do sleep 0.01; done; touch $OUT/lost; sleep 0.3; exit 7; }; sleep 1000")
            launched = self.pair(folder, text)
            ends = [one.end() for one in launched]
        self.assertEqual([code for code, _, _ in ends], [7, 7], ends)
        self.assertRegex(ends[0][2], r"error: on host 1: rank 3 .*exited with code 7\n")


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

    def test_who_started_it_may_have_blocked_them(self):
        block = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        for number in (signal.SIGTERM, signal.SIGINT):
            with temporary_folder() as folder:
                with Launched("sh", "-c", "echo 1 > $OUT/begun; sleep 1000", env={"OUT": str(folder)}, preexec_fn=block) as launched:
                    wait_for_files(folder / "begun")
                    launched.send(number)
                    self.assertEqual(launched.end()[0], 128 + number)

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
        for attempt in range(15 if LONG else 5):
            number = source.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
            with temporary_folder() as folder, \
                    Launched("--nproc-per-node", 2, "sh", "-c", DAEMON + "sleep 1000",
                             # Debian's sh misses a SIGINT that comes while it starts a command: then it is killed.
                             env={"OUT": str(folder), "TMPDIR": str(folder), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}) as launched:
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

    def test_the_supervisor(self):
        with temporary_folder() as folder, \
                Launched("--nproc-per-node", 2, "sh", "-c", STUBBORN, env={"OUT": str(folder)}) as launched:
            wait_for_files(folder / "pid0", folder / "pid1")
            supervisor, = [pid for pid, _ in processes_with(launched.mark) if name_of(pid) == "supervisor"]
            os.kill(supervisor, signal.SIGKILL)
            code, _, err = launched.end()
            self.assertEqual(code, 1)
            self.assertIn("keeps the workers was killed", err)
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
        for attempt in range(15 if LONG else 5):
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
