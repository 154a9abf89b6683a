"""One job of `lockstep bench recovery`, ours or under torchrun. Its ranks are killed at random moments. Reads what its
processes write (see recovery.py): when they finish their next step, and notice the failure, and what they make again."""

import collections
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time

LONGEST_WAIT = 120  # Seconds: enough for a restart of all ranks on a slow machine.


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


class Job:
    def __init__(self, command, folder):
        self.folder = folder
        self.read_to, self.killed = {}, {}  # By process: a place in its file, the generation in which it was killed.
        self.samples, self.finished = {}, collections.defaultdict(set)  # By step; by (step, generation), which processes.
        self.first_made = {}  # By step: when.
        self.generation = self.first_of_generation = self.last_step = self.noticed = self.killed_at = 0
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=open(folder / "errors", "w"),
                                        env={**os.environ, "TMPDIR": str(folder)})  # Torchrun leaves folders there.

    def end(self):
        self.process.terminate()
        self.process.wait()
        self.read()

    def read(self):
        for path in self.folder.glob("steps-*"):
            pid = int(path.name[6:])
            with open(path) as file:
                file.seek(self.read_to.setdefault(pid, 0))
                whole = file.read().rpartition("\n")[0]  # What follows is being written.
            self.read_to[pid] += len(whole) + bool(whole)
            for line in whole.splitlines():
                generation, step, samples, at = map(int, line.split())
                if step < 0:
                    self.noticed = max(self.noticed, at)
                    continue
                self.samples[step] = samples
                self.finished[step, generation].add(pid)
                self.first_made[step] = min(at, self.first_made.get(step, at))
                self.last_step = max(self.last_step, step)
                if (generation, -at) > (self.generation, -self.first_of_generation):
                    self.generation, self.first_of_generation = generation, at

    def wait_for(self, condition, what, every=0.001):
        end = time.monotonic() + LONGEST_WAIT
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{(self.folder / 'errors').read_text()}\nno {what} came; the job's status is {self.process.poll()}")
            time.sleep(every)
            self.read()

    def kill_one(self, random):
        """Kills a rank, and waits for the next step. Seconds until then, and until the last survivor has noticed, or None."""
        end = time.monotonic() + random.uniform(0.1, 0.6)
        self.wait_for(lambda: time.monotonic() > end, "moment")
        victim = random.choice([pid for pid, place in sorted(self.read_to.items()) if place and is_alive(pid)])
        before = self.killed[victim] = self.generation
        at = self.killed_at = time.monotonic_ns()
        os.kill(victim, signal.SIGKILL)
        self.wait_for(lambda: self.generation > before, "step after a kill")
        return (self.first_of_generation - at) / 1e9, (self.noticed - at) / 1e9 if self.noticed > at else None

    def pause(self, seconds):
        """Its end. Reads seldom, as that takes a processor."""
        end = time.monotonic() + seconds
        self.wait_for(lambda: time.monotonic() > end, "end of a pause", every=0.1)
        return time.monotonic_ns()

    def made(self, begin, end):
        """Steps that were made for the first time."""
        return sum(begin <= at < end for at in self.first_made.values())

    def seconds_lost(self, pause, random):
        """By a kill, at the speed of the pauses before it and after its consequences."""
        begin = time.monotonic_ns()
        self.pause(pause)
        self.kill_one(random)
        late = self.pause(pause)
        end = self.pause(pause)
        steps = self.made(begin, self.killed_at) + self.made(late, end)
        speed = max(1, steps) / (self.killed_at - begin + end - late)
        return (end - self.killed_at - self.made(self.killed_at, end) / speed) / 1e9

    def goodput(self, every, kills, random):
        """The part of the time that is left where a rank is killed every so many seconds."""
        lost = statistics.mean(self.seconds_lost(min(2, every), random) for _ in range(kills))
        return max(0, 1 - lost / every)

    def samples_lost(self):
        """Of steps that nobody has finished although later ones were."""
        steps = range(1, self.last_step)
        return sum(max(self.samples.values()) for step in steps if step not in self.samples)

    def samples_repeated(self):
        """Of finished steps. One that a rank alone finished, and was killed, is one that the others have dropped."""
        made = collections.Counter(step for (step, generation), processes in self.finished.items()
                                   if any(self.killed.get(pid) != generation for pid in processes))
        return sum((times - 1) * self.samples[step] for step, times in made.items())

    def weights(self):
        """The hashes of the weights after each epoch: one, unless it was made twice to other bits."""
        weights = collections.defaultdict(set)
        for line in (self.folder / "weights").read_text().splitlines() if (self.folder / "weights").exists() else ():
            epoch, digest = line.split()
            weights[epoch].add(digest)
        return {epoch: sorted(digests) for epoch, digests in weights.items()}


def main():
    config = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    job, chosen = Job(config["command"], pathlib.Path(config["folder"])), random.Random(config["seed"])
    try:
        if config["ends"] and job.process.wait() != 0:
            sys.exit((job.folder / "errors").read_text())
        job.wait_for(lambda: job.last_step > 0 or config["ends"], "first step")
        times = [job.kill_one(chosen) for _ in range(config["kills"])]
        goodput = job.goodput(config["kill_every"], config["goodput_kills"], chosen) if config["goodput_kills"] else None
        last = job.last_step + config["steps_after"]
        job.wait_for(lambda: job.last_step >= last, "next epoch")
    finally:
        job.end()
    pathlib.Path(config["result"]).write_text(json.dumps({
        "recovery": [recovery for recovery, _ in times], "detection": [when for _, when in times if when is not None],
        "goodput": goodput, "samples_lost": job.samples_lost(), "samples_repeated": job.samples_repeated(),
        "weights": job.weights()}))


if __name__ == "__main__":
    main()
