"""Programs on LibTorch alone that train on several processes: how many lines that adds, whether all
ranks end with DDP's weights, and what a user is told who gets it wrong."""

import difflib
import json
import re
import shlex
import subprocess
import unittest

import lockstep_testing as t

SOURCES = t.SOURCE_DIR / "tests" / "porting"
BUILT = t.BUILD_DIR / "tests" / "porting"
LINES = {"stack": 5, "gan": 7, "struct_output": 5, "data_loader": 5, "regression": 5}


def changed_lines(program):
    """With "-" or "+" in front. Empty ones are not counted."""
    single, distributed = ((SOURCES / kind / f"{program}.cpp").read_text().splitlines()
                           for kind in ("single", "distributed"))
    lines = [line for line in difflib.unified_diff(single, distributed, n=0, lineterm="")
             if line[0] in "-+" and line[1:].strip()]
    return [line for line in lines if not line.startswith(("---", "+++"))]


def added_lines(program):
    return [line for line in changed_lines(program) if line[0] == "+"]


def run(kind, program, ranks=2, backend="shm", check=True):
    """What each rank printed, without the launcher's prefixes."""
    return t.run(t.LOCKSTEP, "run", "--nproc-per-node", ranks, BUILT / kind / program, backend, check=check)


def lines_of(result, start):
    return sorted(re.findall(rf"(?m)^(?:\[rank\d+\]:? ?)?({start}.*)$", result.stdout))


class Programs(unittest.TestCase):
    def test_take_few_lines(self):
        for program, most in LINES.items():
            with self.subTest(program):
                self.assertLessEqual(len(added_lines(program)), most, "\n".join(added_lines(program)))

    def test_the_page_shows_what_mnist_needs(self):
        page = (t.SOURCE_DIR / "docs" / "porting.md").read_text()
        shown = re.search(r"(?s)```diff\n(.*?)\n```", page)[1]
        self.assertEqual(shown.splitlines(), changed_lines("mnist"))
        self.assertLessEqual(len(added_lines("mnist")), 5)

    def test_all_ranks_end_with_ddps_weights(self):
        """Over each backend the same: two numbers have one sum."""
        for program in LINES:
            expected = lines_of(run("ddp", program), "weights")
            self.assertEqual(len(expected), 2)
            self.assertEqual(expected[0], expected[1])
            for backend in ("shm", "gloo"):
                with self.subTest(program, backend=backend):
                    self.assertEqual(lines_of(run("distributed", program, backend=backend), "weights"), expected)

    def test_one_rank_trains_as_the_program_before(self):
        for program in ("stack", "struct_output", "regression"):
            with self.subTest(program):
                alone = t.run(BUILT / "single" / program).stdout
                self.assertIn("weights ", alone)
                self.assertEqual(t.run(BUILT / "distributed" / program).stdout, alone)

    def test_counts_are_those_of_all_ranks(self):
        epochs = lines_of(run("distributed", "data_loader"), "epoch")
        self.assertEqual(len(epochs), 6)
        self.assertEqual(epochs[0], epochs[1])
        self.assertRegex(epochs[0], r"^epoch 0: loss \d\.\d+, \d+ of 200 right$")


class Mistakes(unittest.TestCase):
    def test_a_loop_that_ends_by_each_ranks_own_loss(self):
        for backend in ("shm", "gloo"):
            for by_hand in (True, False):
                with self.subTest(backend, by_hand=by_hand):
                    result = (t.run(BUILT / "mistakes" / "uneven_loop", backend, check=False) if by_hand
                              else run("mistakes", "uneven_loop", backend=backend, check=False))
                    self.assertEqual(result.returncode, 1)
                    left = re.findall(r"rank [01] \(process \d+\) left its loop after \d+ steps", result.stderr)
                    self.assertEqual(len(left), 1, result.stderr)
                    self.assertIn("all ranks must make the same number of steps: all-reduce the criterion",
                                  result.stderr)
                    self.assertNotIn("it is the cause", result.stderr)

    def test_a_raw_pointer_does_not_compile(self):
        commands = json.loads((t.BUILD_DIR / "compile_commands.json").read_text())
        entry = next(e for e in commands if e["file"].endswith("porting/distributed/stack.cpp"))
        words = shlex.split(entry["command"])
        at = words.index("-o")
        words = [w for w in words[:at] + words[at + 2:] if w != "-c" and not w.endswith("distributed/stack.cpp")]
        source = SOURCES / "mistakes" / "raw_pointer.cpp"
        result = subprocess.run([*words, "-fsyntax-only", str(source)], cwd=entry["directory"], capture_output=True,
                                text=True, timeout=250, check=False)
        self.assertNotEqual(result.returncode, 0)
        errors = [line for line in result.stderr.splitlines() if " error: " in line]
        self.assertIn("For a module on the stack take lockstep::GradientAverager(model, group)", errors[0])


if __name__ == "__main__":
    t.main()
