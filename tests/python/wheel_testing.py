"""What the tests of the Python package share: the virtual environment with the wheel."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import uuid

import lockstep_testing as t
import torch_forks

FOLDER = t.BUILD_DIR / "python"
VENV = FOLDER / "venv"
PYTHON = VENV / "bin" / "python"
HERE = pathlib.Path(__file__).parent


def require_tools():
    """Ends the script, as skipped, where the wheel cannot be built."""
    if not t.torch_is_the_linked_one():
        reason = "Python's torch is not the LibTorch that was linked"
    elif not all(map(importlib.util.find_spec, ("scikit_build_core", "auditwheel"))):
        reason = "scikit-build-core or auditwheel is missing: scripts/setup.sh --test installs them"
    elif t.SANITIZED:
        reason = "a sanitizer's library cannot be loaded into Python"
    else:
        return
    print("skipped:", reason)
    sys.exit(77)


def package_folder():
    return pathlib.Path(t.run(PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())


def make_venv():
    """A fresh virtual environment that sees this Python's torch, and has nothing else."""
    t.run(sys.executable, "-m", "venv", "--clear", "--without-pip", VENV)
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parents[1]
    (package_folder() / "torch_of_the_tests.pth").write_text(f"{torch}\n")


def pip(*arguments, timeout=600):
    return t.run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, timeout=timeout,
                 env={**os.environ, "PIP_NO_INPUT": "1"})


def run_ranks(ranks, script, *arguments, timeout=120, check=True, each=None, **environment):
    """Runs the script as several ranks. Gives their results in the order of ranks. `each`: a rank's own variables.

    They meet in a file, which is the first of the script's arguments, behind the rank and the number of ranks.
    """
    with t.temporary_folder() as folder:
        meet = folder / uuid.uuid4().hex
        started = [subprocess.Popen(
            [str(word) for word in (*torch_forks.python(executable=PYTHON), script, rank, ranks, meet, *arguments)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
            env=t.clean_environment(PYTHONFAULTHANDLER=1, **environment, **(each[rank] if each else {}))) for rank in range(ranks)]
        results = []
        try:
            for process in started:
                try:
                    out, err = process.communicate(timeout=timeout)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGABRT)
                    out, err = process.communicate()
                    err += f"\nit did not end within {timeout} s"
                results.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
    for result in results:
        if check and result.returncode != 0:
            raise AssertionError("\n".join(f"{r.args} exited with {r.returncode}\n{r.stdout}\n{r.stderr}"
                                           for r in results))
    return results
