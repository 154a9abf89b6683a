"""What a job leaves behind in shared memory and among sockets' names, beside others' jobs on the machine."""

import os
import pathlib

from lockstep_testing import JOB_MARK, wait_until

PATIENCE = 10


def shared_memory():
    """Our entries of /dev/shm. Snapshots are left behind once the folder of checkpoints that they belong to is gone."""
    def belongs_to_a_folder(entry):
        try:
            return pathlib.Path((entry / "checkpoint-dir").read_text()).exists()
        except OSError:
            return False

    folder = pathlib.Path("/dev/shm")
    return {entry.name for entry in folder.glob("*lockstep*") if not belongs_to_a_folder(entry)}


def meeting_sockets():
    """The names under which groups hand their memory over, which lie in no file system."""
    lines = pathlib.Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@lockstep-" in line}


def is_ours(process):
    """Whether this process is meant or one that it has started, at any depth."""
    return process.name == str(os.getpid()) or JOB_MARK.encode() in (process / "environ").read_bytes().split(b"\0")


def nameless_memory():
    """Shared memory that processes of our jobs still hold, by a descriptor or a mapping: it has no name, but a
    number. Other jobs hold theirs as long as they run."""
    found = set()
    for process in filter(lambda entry: entry.name.isdigit(), pathlib.Path("/proc").iterdir()):
        try:
            if not is_ours(process):
                continue
            for line in (process / "maps").read_text().splitlines():
                if "/memfd:lockstep" in line:
                    found.add(f"memfd {line.split()[4]}")
            for fd in (process / "fd").iterdir():
                if os.readlink(fd).startswith("/memfd:lockstep"):
                    found.add(f"memfd {fd.stat().st_ino}")
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    return found


class LeftBehind:
    """Made before a test, asked after it. Each name is unique, and another job's is there for a moment only: what
    is new and stays, was left behind."""

    def __init__(self):
        self.before = self._names()

    @staticmethod
    def _names():
        return shared_memory() | meeting_sockets() | nameless_memory()

    def expect_nothing(self):
        new = self._names() - self.before

        def is_gone():
            new.intersection_update(self._names())
            return not new

        wait_until(is_gone, PATIENCE, f"the end of {sorted(new)}, or of what of it is left behind,")
