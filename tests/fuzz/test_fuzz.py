"""Random programs of all calls of a group, over one backend: `test_fuzz.py shm`, `hierarchical` or `mpi`.

Each rank computes by ATen what every call must give it (oracle.h). In some programs a rank's call differs, and all
must get a MismatchError that names it. In others a rank goes: every other must end in time, by an error that names
it.

    LOCKSTEP_FUZZ_SEED=N           repeats a run
    LOCKSTEP_LONG_TESTS=1          twenty minutes for each backend
    LOCKSTEP_FUZZ_SECONDS=N        so long, about
    test_fuzz.py BACKEND JOB       one job alone; a failure prints it"""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import unittest

import lockstep_testing as t
import mpi_testing
from left_behind import LeftBehind

RANK = t.BUILD_DIR / "tests" / "lockstep_fuzz_rank"
BACKEND = sys.argv.pop(1) if len(sys.argv) > 1 else "shm"
ONE_JOB = json.loads(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1].startswith("{") else None
SEED = int(os.environ.get("LOCKSTEP_FUZZ_SEED") or random.randrange(1 << 30))
LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
SECONDS = float(os.environ.get("LOCKSTEP_FUZZ_SECONDS") or (1200 if LONG else 16))
PLACEMENTS = {"shm": ["aa", "aaa", "aaaa", "aaaaa"], "hierarchical": ["aab", "aabb", "abab", "abba", "aaab", "aabbc"],
              "gloo": ["aa", "aaa"], "mpi": ["aa", "aaa", "aaaa"]}[BACKEND]

PEER_LOST, TIMEOUT, MISMATCH = "PeerLostError", "TimeoutError", "MismatchError"
# A time-out to run into; the ranks must start within it, on a busy machine as well.
SHORT = 10 if BACKEND == "mpi" else 5  # Of joining as well, where mpirun starts the ranks.
# These end a process, so the others notice. After the other ones they may run into the time-out.
GONE = ["kill", "exit", "throw", "leave"]
STILL_THERE = ["stop", "silence", "skip"]
if BACKEND == "mpi":  # Who leaves waits in MPI_Finalize for the others.
    GONE.remove("leave")
    STILL_THERE.append("leave")


class Lines:
    """What the ranks of a job say, as it comes."""

    def __init__(self):
        self.of_rank = {}
        self.other = []
        self.lock = threading.Lock()

    def read(self, stream):
        for line in stream:
            found = re.match(r"rank (\d+): (.*)", line)
            with self.lock:
                if found:
                    self.of_rank.setdefault(int(found[1]), []).append(found[2])
                else:
                    self.other.append(line.rstrip("\n"))

    def starting(self, start):
        """By rank: its last line that starts so."""
        with self.lock:
            found = {rank: [line for line in lines if line.startswith(start)] for rank, lines in self.of_rank.items()}
        return {rank: lines[-1] for rank, lines in found.items() if lines}

    def tail(self):
        with self.lock:
            told = [f"rank {rank}: {line}" for rank, lines in sorted(self.of_rank.items()) for line in lines[-5:]]
            return "\n".join(told + self.other[-30:])


class DirectJob:
    """The ranks as children of this process."""

    def __init__(self, job):
        self.lines = Lines()
        self.ranks, self.readers = [], []
        self.store = subprocess.Popen([RANK, "store"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
                                      env=t.clean_environment())
        port = int(self.store.stdout.readline())
        for rank, host in enumerate(job["placement"]):
            env = t.clean_environment(RANK=rank, WORLD_SIZE=len(job["placement"]), LOCKSTEP_HOST_ID=host,
                                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
            process = subprocess.Popen([RANK, "rank", json.dumps(job)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, text=True, errors="replace", env=env)
            self.ranks.append(process)
            self.readers.append(threading.Thread(target=self.lines.read, args=[process.stdout], daemon=True))
            self.readers[-1].start()

    def running(self):
        return [rank for rank, process in enumerate(self.ranks) if process.poll() is None]

    def codes(self):
        return {rank: process.poll() for rank, process in enumerate(self.ranks)}

    def end(self, rank):
        """Ends a rank that was stopped or is silent."""
        self.ranks[rank].kill()
        self.ranks[rank].wait()

    def all_said(self):
        for reader in self.readers:
            reader.join(10)

    def close(self):
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.all_said()
        for process in [*self.ranks, self.store]:
            process.stdout.close()
        self.store.stdin.close()
        self.store.wait(20)


class MpiJob:
    """The ranks as mpirun's, which ends all when one has failed."""

    def __init__(self, job):
        self.lines = Lines()
        self.size = len(job["placement"])
        # Its shared memory lies in files, which a rank that is killed leaves behind.
        self.folder = contextlib.ExitStack()
        memory = self.folder.enter_context(t.temporary_folder())
        self.run = mpi_testing.MpiRun(self.size, RANK, "rank", json.dumps(job),
                                      env={"OMPI_MCA_btl_vader_backing_directory": memory})
        self.begun = self.locked_up = False
        self.gone_since = None
        self.readers = []
        for stream in (self.run.process.stdout, self.run.process.stderr):
            text = open(os.dup(stream.fileno()), errors="replace")
            self.readers.append(threading.Thread(target=self._read, args=[text], daemon=True))
            self.readers[-1].start()

    def _read(self, text):
        with text:
            self.lines.read(text)

    def running(self):
        if self.run.process.poll() is None:
            self.end_if_locked_up()
        return list(range(self.size)) if self.run.process.poll() is None else []

    def end_if_locked_up(self):
        """Open MPI 4.1's mpirun may lock up when all ranks have ended: a thread of PMIx holds what
        PMIx_server_finalize waits for. That is no rank's failure."""
        if self.run.ranks_of(RANK):
            self.begun, self.gone_since = True, None
        elif self.begun:
            self.gone_since = self.gone_since or time.monotonic()
            if time.monotonic() - self.gone_since > 5:
                self.locked_up = True
                self.run.process.kill()
                self.run.process.wait()

    def codes(self):
        """mpirun's own, which is that of the rank that failed first. One that locked up has none."""
        code = self.run.process.poll()
        if self.locked_up:
            code = 0 if len(self.lines.starting("done")) == self.size else 1
        return {rank: code for rank in range(self.size)}

    def all_said(self):
        for reader in self.readers:
            reader.join(10)

    def close(self):
        self.run.__exit__()
        self.folder.close()


@contextlib.contextmanager
def started(job):
    running = MpiJob(job) if BACKEND == "mpi" else DirectJob(job)
    try:
        yield running
    finally:
        running.close()


def named_ranks(text):
    """Those in "rank 2", "ranks 1 and 2", "ranks 0, 1 and 2"."""
    return {int(number) for numbers in re.findall(r"ranks? (\d+(?:(?:, | and )\d+)*)", text)
            for number in re.findall(r"\d+", numbers)}


def not_led_to(victim, errors, silenced=frozenset()):
    """The ranks whose error names neither the victim nor one whose error leads to it: who waited for a rank
    that has failed first names that one. Nor one of those that could tell no error any more."""
    leading = {victim, *silenced}
    while True:
        more = {rank for rank, text in errors.items() if named_ranks(text) & (leading - {rank})} - leading
        if not more:
            return set(errors) - leading
        leading |= more


class Fuzz(unittest.TestCase):
    def setUp(self):
        self.left_behind = LeftBehind()

    def tearDown(self):
        self.left_behind.expect_nothing()

    def fail_job(self, job, running, what):
        running.all_said()
        self.fail(f"{what}\ncodes {running.codes()}\n{running.lines.tail()}\n"
                  f"LOCKSTEP_FUZZ_SEED={SEED}; this job alone: test_fuzz.py {BACKEND} '{json.dumps(job)}'")

    def await_end(self, job, running, ranks, seconds):
        deadline = time.monotonic() + seconds
        while left := set(running.running()) & set(ranks):
            if time.monotonic() > deadline:
                self.fail_job(job, running, f"ranks {left} still run after {seconds} s")
            time.sleep(0.01)

    def run_program(self, job):
        with started(job) as running:
            self.await_end(job, running, range(len(job["placement"])), job["seconds"] + 60)
            running.all_said()
            done = running.lines.starting("done")
            if set(running.codes().values()) != {0} or len(done) != len(job["placement"]):
                self.fail_job(job, running, "a program failed")
            print(f"  {done[0]}", flush=True)

    def run_ending(self, job):
        ranks = set(range(len(job["placement"])))
        with started(job) as running:
            deadline = time.monotonic() + 60
            while not running.lines.starting("goes by"):
                if time.monotonic() > deadline or not running.running():
                    if running.lines.starting("goes by"):
                        break
                    self.fail_job(job, running, "no rank went")
                time.sleep(0.01)
            victim = next(iter(running.lines.starting("goes by")))
            in_time = 20 if job["ending"] in GONE else 2 * SHORT + 20
            self.await_end(job, running, ranks - {victim}, in_time)
            if job["ending"] == "skip":
                self.await_end(job, running, [victim], in_time)
            elif BACKEND != "mpi":
                running.end(victim)
            running.all_said()
            self.expect_named(job, running, ranks, victim)

    def expect_named(self, job, running, ranks, victim):
        errors = {rank: line for rank, line in running.lines.starting("error ").items() if rank != victim}
        allowed = {PEER_LOST, *({TIMEOUT} if job["ending"] in STILL_THERE else ()),
                   *({MISMATCH} if job["ending"] == "skip" else ())}
        if BACKEND == "mpi":
            # mpirun ends those that have not failed yet when one has, or has died.
            complete = running.codes()[0] != 0 and (errors or job["ending"] in GONE)
            allowed.add(TIMEOUT)
        else:
            complete = set(errors) == ranks - {victim}
        if not complete or running.lines.starting("wrong"):
            self.fail_job(job, running, "some rank did not end with an error of Lockstep's")
        for rank, line in errors.items():
            if line.split()[1] not in allowed:
                self.fail_job(job, running, f"the error of rank {rank} is none of {allowed}")
        # Of those that mpirun ended one was waited for, perhaps, and waited for the victim itself.
        silenced = ranks - {victim} - set(errors) if BACKEND == "mpi" else set()
        if blind := not_led_to(victim, errors, silenced):
            self.fail_job(job, running, f"the errors of ranks {blind} do not lead to rank {victim}")

    def jobs(self, seconds, make):
        """Runs jobs, at least one of each kind, until the time is over."""
        deadline = time.monotonic() + seconds
        for number in itertools.count():
            choose = random.Random(f"{SEED} {number}")
            job, run, last_of_a_round = make(number, choose)
            print(json.dumps(job), flush=True)
            with self.subTest(json.dumps(job)):
                run(job)
            if last_of_a_round and time.monotonic() > deadline:
                return

    @unittest.skipIf(ONE_JOB, "another job is to run alone")
    def test_results_are_the_oracles_and_differences_are_named(self):
        each = 60 if LONG else 4

        def make(number, choose):
            job = {"seed": SEED + number, "backend": BACKEND, "placement": choose.choice(PLACEMENTS), "seconds": each,
                   "mismatches": BACKEND in ("shm", "hierarchical") or number % 2 == 1, "timeout": 30}
            # Over the others calls are compared at this level only.
            job["detail"] = job["mismatches"] and (BACKEND not in ("shm", "hierarchical") or number % 4 == 3)
            job["large"] = choose.choice([1000, 100_000, 400_000, 4_000_000 if LONG else 400_000])
            return job, self.run_program, number % 2 == 1

        self.jobs(SECONDS / 2, make)

    @unittest.skipIf(ONE_JOB, "another job is to run alone")
    def test_a_rank_that_goes_is_named_by_all_others(self):
        # Time-outs take time, so there is one of these in a round.
        round_length = len(GONE) + 1

        def make(number, choose):
            place = number % round_length
            last = place == len(GONE)
            ending = STILL_THERE[(SEED + number // round_length) % len(STILL_THERE)] if last else GONE[place]
            job = {"seed": SEED + number, "backend": BACKEND, "placement": choose.choice(PLACEMENTS), "blocks": 2000,
                   "large": 100_000, "ending": ending, "timeout": SHORT if last else 60,
                   # What a call left out leads to is promised where all calls are compared.
                   "detail": ending == "skip"}
            return job, self.run_ending, last

        self.jobs(SECONDS / 2, make)

    @unittest.skipUnless(ONE_JOB, "no job is given")
    def test_one_job(self):
        (self.run_ending if ONE_JOB.get("ending") else self.run_program)(ONE_JOB)


if __name__ == "__main__":
    if BACKEND == "mpi" and (reason := mpi_testing.missing() or (
            None if mpi_testing.lockstep_has_mpi() else "Lockstep was built without MPI")):
        mpi_testing.skip_all(reason)
    print(f"LOCKSTEP_FUZZ_SEED={SEED}", flush=True)
    t.main()
