"""The RPC programs as a user starts them, and what they learn."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import unittest

import lockstep_testing as t

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
EXAMPLES = t.BUILD_DIR / "examples"
# The real data where it is, else the built-in digits.
DATA = {} if t.data_dir() is None else {"LOCKSTEP_DATA_DIR": t.data_dir()}


def run(program, *arguments, timeout=600):
    return t.run(EXAMPLES / program, *arguments, timeout=timeout, env=t.clean_environment(**DATA)).stdout


def free_port():
    """A port that was free a moment ago: the program takes a number, as the tutorial's does."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Runs its arguments as a program that may make no memory to share, as some containers' filters have it.
WITHOUT_MEMFD = """
import ctypes, os, platform, struct, sys
number = {"x86_64": 319, "aarch64": 279}[platform.machine()]
load, refuse, allow = (0x20, 0, 0, 0), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)
steps = b"".join(struct.pack("HBBI", *step) for step in (load, (0x15, 0, 1, number), refuse, allow))
program = ctypes.create_string_buffer(steps)
filter = ctypes.create_string_buffer(struct.pack("HP", 4, ctypes.addressof(program)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
if prctl(38, 1, 0, 0, 0) != 0 or prctl(22, 2, filter) != 0:
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
os.execv(sys.argv[1], sys.argv[1:])
"""


class Page(unittest.TestCase):
    def test_the_page_shows_the_program(self):
        page = (t.SOURCE_DIR / "docs" / "rpc.md").read_text()
        program = (t.SOURCE_DIR / "examples" / "quickstart" / "rpc.cpp").read_text()
        self.assertIn(f"```cpp\n{program}```", page)
        self.assertLessEqual(len(program.splitlines()), 40)

    def test_the_program_learns(self):
        for output in (run("quickstart/rpc"),
                       t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, EXAMPLES / "quickstart/rpc").stdout):
            losses = [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", output)]
            self.assertEqual(len(losses), 4, output)
            self.assertLess(losses[-1], 0.1 * losses[0])


    def test_it_runs_where_memory_cannot_be_shared(self):
        result = t.run(sys.executable, "-c", WITHOUT_MEMFD, EXAMPLES / "quickstart/rpc")
        self.assertIn("step 100: loss", result.stdout)
        self.assertEqual(result.stderr, "")


class ParameterServer(unittest.TestCase):
    PROGRAM = EXAMPLES / "003_rpc/parameter_server"
    # How updates meet differs from run to run, and the last ones count most. Chance is 0.1.
    SHORT = ("--limit", 2000, "--lr", 0.05, "--batch-size", 8)

    def train(self, *arguments, timeout=120):
        """Accuracies and the most steps ahead of two trainers."""
        output = run("003_rpc/parameter_server", *arguments, timeout=timeout)
        accuracies = dict(re.findall(r"trainer (\d): accuracy ([\d.]+)", output))
        self.assertEqual(sorted(accuracies), ["1", "2"], output)
        rates = re.findall(r"trainer \d: (\d+) samples/s, at most (\d+) steps ahead", output)
        self.assertEqual(len(rates), 2, output)
        self.assertGreater(min(int(rate) for rate, _ in rates), 0)
        return [float(accuracy) for accuracy in accuracies.values()], [int(ahead) for _, ahead in rates]

    def test_two_trainers_learn(self):
        """Each sees half of the data, and both end with the one model."""
        accuracies, _ = self.train(*self.SHORT)
        self.assertGreater(min(accuracies), 0.5)
        self.assertEqual(*accuracies)

    def test_they_learn_from_two_servers(self):
        accuracies, ahead = self.train(*self.SHORT, "--world-size", 4, "--servers", 2, "--max-staleness", 3)
        self.assertGreater(min(accuracies), 0.5)
        self.assertEqual(*accuracies)
        self.assertLessEqual(max(ahead), 3)

    def test_a_bound_holds_the_fast_one_back(self):
        """Without one it would be three steps ahead in the end: as long as the other one rests."""
        few = ("--limit", 256, "--straggle", 100)
        self.assertLessEqual(max(self.train(*few, "--max-staleness", 1)[1]), 1)
        self.assertEqual(self.train(*few, "--max-staleness", 0)[1], [0, 0])

    def test_a_trainer_that_is_killed_does_not_hold_the_others_up(self):
        """All go in step, so the others would wait for it at once."""
        with contextlib.ExitStack() as stack:
            port = free_port()
            processes = []
            for rank in range(3):
                command = [self.PROGRAM, "--limit", 2000, "--max-staleness", 0, "--rank", rank, "--master-port", port]
                process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True,
                                           env=t.clean_environment(**DATA))
                processes.append(stack.enter_context(process))
                stack.callback(process.kill)
            self.assertIn("trainer 2: epoch 1, batch 0", processes[2].stdout.readline())
            processes[2].kill()
            server, trainer = (process.communicate(timeout=120)[0] for process in processes[:2])
            self.assertEqual([process.returncode for process in processes[:2]], [0, 0], server + trainer)
            self.assertRegex(trainer, r"trainer 1: accuracy [\d.]+")

    def test_servers_only_are_an_error(self):
        result = t.run(self.PROGRAM, "--world-size", 2, "--servers", 2, check=False)
        self.assertEqual(result.returncode, 2)
        self.assertIn("--servers 2 of 2 processes leave none to train", result.stderr)

    @unittest.skipUnless(t.data_dir() and LONG, "long: LOCKSTEP_LONG_TESTS=1, and real MNIST")
    def test_the_whole_of_mnist(self):
        for arguments in ((), ("--world-size", 4, "--servers", 2, "--max-staleness", 4)):
            self.assertGreaterEqual(min(self.train(*arguments, timeout=900)[0]), 0.97)

    def test_both_ways_of_the_batching_server_learn(self):
        """Who ends first has a model that may lack the other's half: 0.71 to 0.86 were seen. Chance is 0.1."""
        output = run("003_rpc/batch_parameter_server", "--limit", 4000)
        for way in ("a step per request", "batched"):
            found = re.findall(rf"trainer \d: {way}: (\d+) requests/s, accuracy ([\d.]+)", output)
            self.assertEqual(len(found), 2, output)
            for rate, accuracy in found:
                self.assertGreater(int(rate), 0)
                self.assertGreater(float(accuracy), 0.5)
        both = re.search(r"server: a step per request: (\d+) requests/s; batched: (\d+) requests/s", output)
        self.assertTrue(both and min(map(int, both.groups())) > 0, output)


class Rnn(unittest.TestCase):
    def test_the_model_over_two_workers_learns(self):
        """Chance is a perplexity of some 28, the number of letters."""
        output = run("003_rpc/rnn", "--epochs", 3)
        perplexities = [float(p) for p in re.findall(r"epoch \d: loss [\d.]+, perplexity ([\d.]+)", output)]
        self.assertEqual(len(perplexities), 3, output)
        self.assertLess(perplexities[-1], 0.75 * perplexities[0])
        self.assertLess(perplexities[-1], 16)


class ReinforcementLearning(unittest.TestCase):
    def test_both_ways_learn(self):
        """A pole that is pushed at random stands for some 22 steps."""
        output = run("003_rpc/reinforcement_learning", "--episodes", 20, "--world-size", 3)
        for way in ("one by one", "batched"):
            found = re.search(rf"{way}: (\d+) actions/s, average ([\d.]+)", output)
            self.assertTrue(found, output)
            self.assertGreater(float(found[2]), 35, output)

    def test_the_same_seed_is_the_same_run(self):
        """Few episodes: another last bit in a sum would in time be another run."""
        few = ("003_rpc/reinforcement_learning", "--episodes", 3, "--world-size", 3, "--log-interval", 1)
        first, second = (re.findall("episode .*", run(*few, "--way", "plain")) for _ in range(2))
        self.assertEqual(len(first), 3)
        self.assertEqual(first, second)

    def test_a_way_that_does_not_exist_is_an_error(self):
        result = t.run(EXAMPLES / "003_rpc/reinforcement_learning", "--way", "all", check=False)
        self.assertEqual(result.returncode, 2)
        self.assertIn("expected plain, batched or both", result.stderr)


class DdpRpc(unittest.TestCase):
    def test_the_table_and_the_trainers_learn(self):
        """Chance is 1 of 8."""
        commands = ([EXAMPLES / "003_rpc/ddp_rpc"],
                    [t.LOCKSTEP, "run", "--nproc-per-node", 5, EXAMPLES / "003_rpc/ddp_rpc", "--trainers", 3])
        for command, trainers in zip(commands, (2, 3)):
            output = t.run(*command, "--epochs", 5, timeout=600).stdout
            found = dict(re.findall(r"master: trainer (\d) has an accuracy of ([\d.]+)", output))
            self.assertEqual(sorted(found), [str(i) for i in range(trainers)], output)
            self.assertGreater(min(map(float, found.values())), 0.9, output)


class Hogwild(unittest.TestCase):
    def test_processes_with_the_same_parameters_learn(self):
        """Where a write of one process meets another's differs from run to run."""
        output = run("003_rpc/hogwild", "--limit", 2000, "--lr", 0.05, "--batch-size", 8)
        found = dict(re.findall(r"process (\d): accuracy ([\d.]+)", output))
        self.assertEqual(sorted(found), ["0", "1"], output)
        self.assertGreater(float(found["0"]), 0.5, output)
        self.assertEqual(found["0"], found["1"], "the parameters are one memory")


class Pipeline(unittest.TestCase):
    def test_the_pipeline_over_rpc_computes_what_ours_does(self):
        output = run("003_rpc/rpc_pipeline", "--batches", 3, "--batch-size", 8, "--image-size", 16, "--splits", "1,4")
        losses = dict(re.findall(r"^(.+): \d+ images/s, last loss ([\d.]+)$", output, re.MULTILINE))
        self.assertEqual(len(losses), 4, output)
        for parts in ("1 part", "4 parts"):
            # Gradients add up in another order.
            self.assertAlmostEqual(float(losses[f"RPC, {parts}"]),
                                   float(losses[f"Lockstep's pipeline, {parts}"]), delta=1e-3)

    def test_a_number_of_parts_that_does_not_fit_is_an_error(self):
        result = t.run(EXAMPLES / "003_rpc/rpc_pipeline", "--splits", "3", check=False)
        self.assertEqual(result.returncode, 2)
        self.assertIn("--splits 3 does not divide --batch-size 32", result.stderr)


if __name__ == "__main__":
    t.main()
