"""PyTorch's own tests of torch.distributed, as they come with the torch that is installed, over "lockstep".

Three ranks run them. A test must pass on all ranks unless SKIPPED names it. What PyTorch itself skips here must be
for one of the reasons of THEIR_SKIPS.

Each test that does not run is printed with its reason. LOCKSTEP_SUITE=REGEX runs the tests whose names match.
"""

import json
import os
import queue
import re
import subprocess
import threading
import unittest

import lockstep_testing as t
import torch_forks
import wheel_testing as w

w.require_tools()

RANKS = 3
ONLY = os.environ.get("LOCKSTEP_SUITE", "")
TEST_TIMEOUT = 120

# Names, as regular expressions, and why they do not run or may fail.
SKIPPED = {
    r"^test_ddp_logging_data_cpu$": "c10d calls every backend that is not its own 'custom' in DDP's log",
    r"^test_monitored_barrier_(failure_order|gloo|gloo_rank_0_timeout|gloo_subgroup|wait_all_ranks)$":
        "they look for Gloo's own words; test_groups.py has the same with ours",
}
# Why PyTorch skips a test here, as regular expressions, and what that means.
THEIR_SKIPS = {
    r"CUDA|N[Cc][Cc][Ll]|nccl'\}": "it needs GPUs",
    r"github\.com/pytorch/pytorch/(issues|pull)/\d+|flakiness": "PyTorch has switched it off",
    r"world size of 4": "it needs four ranks",
    r"torchvision": "it needs torchvision",
}


class Ranks:
    """Processes that run one test after the other. All of them are replaced after one that failed."""

    def __init__(self):
        self.processes, self.answers = [], []
        python = torch_forks.python("torch.testing._internal.common_distributed", executable=w.PYTHON)
        for rank in range(RANKS):
            process = subprocess.Popen(
                [*python, w.HERE / "suite_rank.py", str(rank), str(RANKS)], text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                env=t.clean_environment(PYTHONUNBUFFERED=1))
            self.processes.append(process)
            answers = queue.Queue()
            self.answers.append(answers)
            threading.Thread(target=self.read, args=(process.stdout, answers), daemon=True).start()
            threading.Thread(target=self.read_errors, args=(process,), daemon=True).start()
        self.names = [self.answer(rank, 200) for rank in range(RANKS)][0]
        if self.names[:1] == ["failed"]:
            self.close()
            raise AssertionError(self.names[1])

    @staticmethod
    def read(stream, answers):
        for line in stream:
            answers.put(json.loads(line))
        answers.put(None)

    @staticmethod
    def read_errors(process):
        process.said = []
        for line in process.stderr:
            process.said = process.said[-80:] + [line]

    def answer(self, rank, timeout):
        try:
            answer = self.answers[rank].get(timeout=timeout)
        except queue.Empty:
            answer = None
        return answer or ["failed", "no answer; it said\n" + "".join(self.processes[rank].said), 0.0]

    def run(self, name):
        with t.temporary_folder() as folder:
            for part in ("barrier", "test_dir"):
                (folder / part).mkdir()
            for process in self.processes:
                process.stdin.write(f"{name} {folder}\n")
            results = [self.answer(rank, TEST_TIMEOUT) for rank in range(RANKS)]
        return results

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                try:
                    stream.close()
                except (OSError, RuntimeError):
                    pass


def reason_of(table, text):
    return next((pattern for pattern in table if re.search(pattern, text)), None)


class Suite(unittest.TestCase):
    ranks = None

    @classmethod
    def setUpClass(cls):
        cls.ranks = Ranks()

    @classmethod
    def tearDownClass(cls):
        cls.ranks.close()

    def verdict(self, results):
        """What is wrong with a test's results; None: nothing. And whether it ran."""
        outcomes = {outcome for outcome, _, _ in results}
        if outcomes == {"passed"}:
            return None, True
        if "failed" not in outcomes and outcomes == {"skipped"}:
            if all(reason_of(THEIR_SKIPS, text) for _, text, _ in results):
                return None, False
            return "skipped for another reason: " + results[0][1], False
        # Some tests are skipped on the ranks that are not part of them.
        if "failed" not in outcomes:
            return None, True
        return "\n".join(f"rank {rank}: {outcome} {text}" for rank, (outcome, text, _) in enumerate(results)), True

    def test_suite(self):
        names = [name for name in self.ranks.names if not reason_of(SKIPPED, name)]
        names = [name for name in names if re.search(ONLY, name)]
        ran, slow = 0, []
        skipped = {name: SKIPPED[pattern] for name in self.ranks.names if (pattern := reason_of(SKIPPED, name))}
        for name in names:
            with self.subTest(name):
                results = self.ranks.run(name)
                slow.append((max(seconds for _, _, seconds in results), name))
                wrong, counts = self.verdict(results)
                ran += counts
                if not counts and not wrong:
                    skipped[name] = THEIR_SKIPS[reason_of(THEIR_SKIPS, results[0][1])] + ": " + results[0][1]
                if any(outcome == "failed" for outcome, _, _ in results):
                    type(self).ranks.close()
                    type(self).ranks = Ranks()
                if wrong:
                    self.fail(wrong)
        print(f"{ran} tests ran, {len(names) - ran} were skipped by PyTorch")
        for name, reason in sorted(skipped.items()):
            print(f"skipped: {name}: {reason}")
        print("slowest:", sorted(slow)[-12:])
        self.assertGreater(ran, 0 if ONLY else 110, "PyTorch skips more than it did")

    def test_what_is_skipped_exists(self):
        for pattern in SKIPPED:
            self.assertTrue(any(re.search(pattern, name) for name in self.ranks.names), pattern)


if __name__ == "__main__":
    t.main()
