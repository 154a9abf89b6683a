"""What the tests that start their ranks by mpirun share."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

from lockstep_testing import LOCKSTEP, temporary_folder
from run_testing import marked_environment, processes_with
from lockstep_testing import wait_until

MPIRUN = os.environ.get("LOCKSTEP_MPIRUN") or shutil.which("mpirun")


def missing():
    """Why nothing can be tested here, or None."""
    if not MPIRUN or not pathlib.Path(MPIRUN).exists():
        return "no mpirun: install openmpi-bin"
    version = subprocess.run([MPIRUN, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        return f"{MPIRUN} is not Open MPI's, whose variables Lockstep reads"
    return None


def lockstep_has_mpi():
    shown = subprocess.run([LOCKSTEP, "env", "--json"], stdout=subprocess.PIPE, text=True, check=True).stdout
    import json
    return "mpi" in json.loads(shown)["backends"]


class MpiRun:
    """mpirun with these words, in a session of its own, with a temporary folder of its own: Open MPI
    leaves its session folder behind when it is killed. Use as a context manager."""

    def __init__(self, ranks, *words, env=None, options=()):
        self.folder_context = temporary_folder()
        self.folder = self.folder_context.__enter__()
        # As root mpirun wants to be asked twice; more ranks than cores it starts only when told to.
        extra = {"TMPDIR": self.folder, "OMPI_MCA_orte_tmpdir_base": self.folder, "OMPI_ALLOW_RUN_AS_ROOT": 1,
                 "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1, "NO_COLOR": 1,
                 # Open MPI itself does not free all that it takes.
                 "ASAN_OPTIONS": ":".join(filter(None, (os.environ.get("ASAN_OPTIONS"), "detect_leaks=0")))}
        self.env, self.mark = marked_environment(**extra, **(env or {}))
        self.process = subprocess.Popen(
            [MPIRUN, "--oversubscribe", "-np", str(ranks), *map(str, options), *map(str, words)], env=self.env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for number, _ in processes_with(self.mark):
            try:
                os.kill(number, signal.SIGKILL)  # Ours by its mark; there when the test has failed.
            except ProcessLookupError:
                pass
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()
        self.folder_context.__exit__(None, None, None)

    def end(self, timeout=120):
        """Exit code, standard output and error, as text."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out.decode(errors="replace"), err.decode(errors="replace")

    def ranks_of(self, program):
        """The process numbers of the ranks, by rank, as far as they have started."""
        found = {}
        for number, command in processes_with(self.mark):
            if str(program).encode() not in command.split(b"\0")[0]:
                continue
            try:
                variables = pathlib.Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for variable in variables:
                if variable.startswith(b"OMPI_COMM_WORLD_RANK="):
                    found[int(variable.split(b"=")[1])] = number
        return found

    def nothing_left(self):
        wait_until(lambda: not processes_with(self.mark), timeout=10, what=f"the end of {processes_with(self.mark)}")


def mpirun(ranks, *words, env=None, options=(), timeout=180):
    """Runs it to its end: exit code, standard output and standard error. Nothing may be left."""
    with MpiRun(ranks, *words, env=env, options=options) as job:
        result = job.end(timeout)
        job.nothing_left()
        return result


def skip_all(reason):
    print(f"skipped: {reason}")
    sys.exit(77)
