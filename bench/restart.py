"""From `kill -9` of a rank to the first logged step of the next attempt (its tenth): two ranks of `lockstep train` on digits,
started by `lockstep train`, by `lockstep run` and by torchrun, in turns.

    bench/restart.py [--lockstep build/bin/lockstep] [--torchrun .venv/bin/torchrun] [--kills 12]
"""

import argparse
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Job:
    """A job that trains until it is closed, and the lines that it prints with their times."""

    def __init__(self, command, folder):
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        env=dict(os.environ, OMP_NUM_THREADS="1"), start_new_session=True)
        self.lines = []
        self.arrived = threading.Condition()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            with self.arrived:
                self.lines.append((time.monotonic(), line))
                self.arrived.notify_all()

    def next(self, pattern, start, timeout=60):
        """The place of the first line from `start` on that has the pattern, and its time."""
        with self.arrived:
            end = time.monotonic() + timeout
            while True:
                for at in range(start, len(self.lines)):
                    if re.search(pattern, self.lines[at][1]):
                        return at, self.lines[at][0]
                start = len(self.lines)
                if not self.arrived.wait(end - time.monotonic()):
                    raise TimeoutError(f"no {pattern!r} came: " + "".join(line for _, line in self.lines[-20:]))

    def ranks(self, program):
        """Processes below the job that run the program and have started none."""
        found, left = [], [self.process.pid]
        while left:
            pid = left.pop()
            children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            left += map(int, children)
            if not children and os.path.realpath(f"/proc/{pid}/exe") == program:
                found.append(pid)
        return found

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def measure(job, program, chance):
    """Seconds from the death of a rank to the first step of the next attempt."""
    with job.arrived:
        start = len(job.lines)
    job.next("step", start)
    time.sleep(chance.uniform(0.2, 0.5))  # some checkpoints
    victim = chance.choice(job.ranks(program))
    with job.arrived:
        start = len(job.lines)
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    header = job.next("resumed after step", start)[0]
    return job.next("step", header + 1)[1] - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default=ROOT / "build/bin/lockstep")
    parser.add_argument("--torchrun", default=ROOT / ".venv/bin/torchrun")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    lockstep = os.path.realpath(options.lockstep)
    train = [lockstep, "train", "--dataset", "digits", "--max-epochs", "100000", "--log-every-n-steps", "10", "--checkpoint-dir",
             "run", "--resume", "auto"]
    ranks = ["--nproc-per-node", "2", "--max-restarts", str(options.kills + 1)]
    jobs = {"lockstep train": [*train, "--devices", "2", "--max-restarts", str(options.kills + 1)],
            "lockstep run": [lockstep, "run", *ranks, *train]}
    if os.path.exists(options.torchrun):
        jobs["torchrun"] = [options.torchrun, "--standalone", *ranks, "--no-python", *train]
    print(f"seed {options.seed}, {options.kills} kills each")
    chance, took = random.Random(options.seed), {name: [] for name in jobs}
    with tempfile.TemporaryDirectory(prefix="restart-bench-") as folder:
        for half in range(2):  # in turns: what else the machine does changes with time
            for name, command in jobs.items():
                own = pathlib.Path(folder, f"{name}-{half}")
                own.mkdir()
                job = Job([str(word) for word in command], own)
                try:
                    took[name] += [measure(job, lockstep, chance) for _ in range(options.kills // 2)]
                finally:
                    job.close()
    print("started by           p50      least    most")
    for name, times in took.items():
        print(f"{name:16s} {statistics.median(times):7.3f} s {min(times):7.3f} s {max(times):7.3f} s")


if __name__ == "__main__":
    main()
