"""What the Python test scripts share. Only the standard library is imported here."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

LOCKSTEP = os.environ.get("LOCKSTEP", "")
SOURCE_DIR = pathlib.Path(os.environ.get("LOCKSTEP_SOURCE_DIR", pathlib.Path(__file__).parents[2]))
BUILD_DIR = pathlib.Path(os.environ.get("LOCKSTEP_BUILD_DIR", SOURCE_DIR / "build"))
LIBTORCH = os.environ.get("LOCKSTEP_LIBTORCH", "")

def _sanitized():
    cache = BUILD_DIR / "CMakeCache.txt"
    return cache.exists() and "-fsanitize=" in cache.read_text()


# True in a build with a sanitizer, which takes terabytes of addresses and more time.
SANITIZED = _sanitized()

# All that this process starts inherits it: so its jobs are told from those of others on the machine.
JOB_MARK = f"TEST_JOB_MARK={os.getpid()}-{time.monotonic_ns()}"
os.environ.update([JOB_MARK.split("=")])

# A script's background job ignores these, under nohup the last too, and all that it starts would as well.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)


def data_dir():
    """The folder with real MNIST, or None: LOCKSTEP_DATA_DIR, else ../shared/data."""
    for folder in (os.environ.get("LOCKSTEP_DATA_DIR"), SOURCE_DIR.parent / "shared" / "data"):
        if folder and (pathlib.Path(folder) / "mnist").is_dir():
            return pathlib.Path(folder)
    return None


NO_DATA = "no MNIST: set LOCKSTEP_DATA_DIR to a folder that holds mnist/"


def torch_is_the_linked_one():
    """True when Python's torch is the LibTorch that our binaries link."""
    import importlib.util

    found = importlib.util.find_spec("torch")
    return bool(found and LIBTORCH and os.path.realpath(os.path.dirname(found.origin)) == os.path.realpath(LIBTORCH))


def clean_environment(**extra):
    """The environment without any launcher's variables, with one thread a process."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "LOCKSTEP_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop) or k == "LOCKSTEP_DATA_DIR"}
    env.update({"OMP_NUM_THREADS": "1", **{k: str(v) for k, v in extra.items()}})
    return env


def run(*command, timeout=120, check=True, env=None, cwd=None, stdin=subprocess.DEVNULL):
    """Runs a command to its end in a process group of its own; kills the group at the time-out."""
    command = [str(c) for c in command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=stdin, text=True,
                               env=env or clean_environment(), cwd=cwd, start_new_session=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} did not end within {timeout} s\n{out}\n{err}")
    result = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check and process.returncode != 0:
        raise AssertionError(f"{command} exited with {process.returncode}\nstdout:\n{out}\nstderr:\n{err}")
    return result


def wait_until(condition, timeout=30, what="the condition"):
    """Polls until condition() is true; fails after the time-out."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {timeout} s")
        time.sleep(0.01)


@contextlib.contextmanager
def temporary_folder():
    folder = tempfile.mkdtemp(prefix="lockstep-test.")
    try:
        yield pathlib.Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    """Runs the script's unittest cases; exits 77 when all of them were skipped."""
    program = unittest.main(module="__main__", exit=False, verbosity=2)
    result = program.result
    if result.wasSuccessful() and result.testsRun and len(result.skipped) == result.testsRun:
        sys.exit(77)
    sys.exit(0 if result.wasSuccessful() else 1)
