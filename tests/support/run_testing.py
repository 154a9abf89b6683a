"""What the tests of `lockstep run` share."""

import contextlib
import os
import pathlib
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import uuid

from lockstep_testing import BUILD_DIR, LOCKSTEP, clean_environment, wait_until

TORCHRUN = pathlib.Path(sys.executable).parent / "torchrun"
CPP_RANK = BUILD_DIR / "tests" / "lockstep_comm_rank"
MARK = "LOCKSTEP_TEST_MARK"


def marked_environment(**extra):
    """An environment that marks all that is started with it, and the mark."""
    mark = uuid.uuid4().hex
    return clean_environment(**{MARK: mark}, **extra), mark


def processes_with(mark):
    """The numbers and command lines of living processes whose environment holds the mark."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((int(folder.name), (folder / "cmdline").read_bytes()))
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    return found


def name_of(pid):
    """As ps shows it."""
    return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()


def running(mark, program):
    """The processes of a job that run this program as ranks."""
    found = []
    for pid, _ in processes_with(mark):
        try:
            if os.readlink(f"/proc/{pid}/exe") == str(program) and b"\0RANK=" in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class InOwnSession:
    """Holds `process`, a child that was started in a session of its own. All of that is gone at the end."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()

    def exit_code(self):
        """Of the process that has ended: 128 + N for a signal."""
        code = self.process.returncode
        return 128 - code if code < 0 else code


class Launched(InOwnSession):
    """`lockstep run` with these words, as a child in a session of its own."""

    def __init__(self, *words, env=None, **popen):
        self.env, self.mark = marked_environment(**(env or {}))
        self.process = subprocess.Popen(
            [LOCKSTEP, "run", *map(str, words)], env=self.env, stdin=subprocess.DEVNULL,
            start_new_session=popen.pop("start_new_session", True),
            stdout=popen.pop("stdout", subprocess.PIPE), stderr=popen.pop("stderr", subprocess.PIPE), **popen)

    def send(self, number):
        os.kill(self.process.pid, number)

    def end(self, timeout=30):
        """Exit code (128 + N for a signal), standard output and error, as text."""
        out, err = self.process.communicate(timeout=timeout)
        return self.exit_code(), (out or b"").decode(errors="replace"), (err or b"").decode(errors="replace")

    def nothing_left(self):
        wait_until(lambda: not processes_with(self.mark), timeout=10,
                   what=f"the end of {processes_with(self.mark)}")


def lockstep_run(*words, env=None, timeout=60, cwd=None):
    """Runs it to its end: exit code, standard output and standard error."""
    with Launched(*words, env=env, cwd=cwd) as launched:
        result = launched.end(timeout)
        launched.nothing_left()
        return result


def wait_for_files(*paths, timeout=30):
    for path in paths:
        wait_until(lambda: path.exists() and path.stat().st_size, timeout, f"{path}")


def seconds(since):
    return time.monotonic() - since


class OtherProgram(socketserver.ThreadingTCPServer):
    """A server at a free port of this host that says the same to all who come, then hangs up. Use as a context manager."""

    def __init__(self, banner):
        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                with contextlib.suppress(OSError):
                    self.request.recv(1)
                    self.request.sendall(banner)
                    self.request.shutdown(socket.SHUT_WR)
                    while self.request.recv(65536):
                        pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self.thread.start()

    @property
    def port(self):
        return self.server_address[1]

    def __exit__(self, *what):
        self.shutdown()
        self.thread.join(20)
        super().__exit__(*what)
