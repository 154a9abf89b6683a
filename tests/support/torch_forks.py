"""Processes of Python that need torch. Its import takes seconds, so one process imports it, and forks for each of them.

    subprocess.Popen([*torch_forks.python(), "script.py", "word"], ...)

has the standard streams, the environment, the folder and the exit code that Python's own would have. When it is killed,
so is the script. It takes a script, or -m and a module, and none of Python's other flags."""

import atexit
import contextlib
import functools
import importlib
import json
import os
import pathlib
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import traceback

# Of these torch._dynamo is what the first optimizer or DDP of a process imports.
MODULES = ("torch", "torch.distributed", "torch._dynamo", "safetensors.torch")


@functools.cache
def python(*more, executable=sys.executable):
    """The words that stand for Python in a command. The process that forks has imported MODULES and these; it ends with this one."""
    address = f"torch-forks-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(64)
        # Threads would be lost in a fork.
        server = subprocess.Popen([executable, __file__, "serve", str(listener.fileno()), *MODULES, *more], stdin=subprocess.PIPE,
                                  pass_fds=[listener.fileno()], start_new_session=True,
                                  env={**os.environ, "OMP_NUM_THREADS": "1"})

    @atexit.register
    def end():
        server.stdin.close()
        server.wait()

    return [str(executable), "-S", "-E", __file__, address]


def executable(folder, *more, of=sys.executable):
    """A file that can be called as this Python is. Its scripts are run by the process that forks, the rest by Python itself."""
    file = pathlib.Path(folder) / "python3"
    file.write_text(f'#!/bin/sh\ncase "$1" in -*) exec {of} "$@";; esac\nexec {shlex.join(python(*more, executable=of))} "$@"\n')
    file.chmod(0o755)
    return file


def call(address, *words):
    """Has the words run by the process that forks, and ends as they do."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"\0{address}")
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(json.dumps([words, os.getcwd(), dict(os.environ)]).encode() + b"\n")
        status = server.makefile("rb").readline()
    if not status:
        sys.exit(f"{__file__}: the process that imports torch has ended")
    code = os.waitstatus_to_exitcode(int(status))
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(listener, *modules):
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(listener)) as listener:
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    fork_for(connection)


def fork_for(connection):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile("rb").readline())
    child = os.fork()
    if child == 0:
        connection.close()
        run(streams, *request)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(child, signal.SIGABRT)  # Whoever asked has been killed.
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def run(streams, words, folder, environment):
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "PYTHONFAULTHANDLER" in environment:
        importlib.import_module("faulthandler").enable()
    module = words[0] == "-m"
    sys.argv = words[module:]
    sys.path[:1] = [folder if module else os.path.dirname(words[0]), *filter(None, environment.get("PYTHONPATH", "").split(":"))]
    code = 1
    try:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True) if module else runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else end.code is not None
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1] == "serve" else call(*sys.argv[1:])
