"""Model checking with spin: the models are searched whole, and their mutations must be found wrong."""

import pathlib
import re
import shutil
import unittest

import lockstep_testing as t

STEP_BARRIER = pathlib.Path(__file__).with_name("step_barrier.pml")
NO_SPIN = "no spin or no gcc: install Debian's packages spin and gcc"


def search(model, *defines):
    """The number of errors that spin finds; fails when it could not look at all states."""
    flags = [f"-D{define}" for define in defines]
    with t.temporary_folder() as folder:
        t.run("spin", "-a", *flags, model, cwd=folder)
        t.run("gcc", "-O1", "-w", "-DSAFETY", "-DMEMLIM=3000", "-o", "pan", "pan.c", cwd=folder)
        out = t.run(folder / "pan", "-m100000", "-b", cwd=folder, timeout=240).stdout
    errors = int(re.search(r"errors: (\d+)", out).group(1))
    if errors == 0 and ("Search not completed" in out or "depth too small" in out or "out of memory" in out):
        raise AssertionError(f"{defines}: the search did not end\n{out}")
    return errors


@unittest.skipUnless(shutil.which("spin") and shutil.which("gcc"), NO_SPIN)
class StepBarrier(unittest.TestCase):
    def check(self, *variants):
        for variant in variants:
            with self.subTest(variant=variant):
                self.assertEqual(search(STEP_BARRIER, *variant.split()), 0)

    def test_two_ranks(self):
        self.check(
            "RANKS=2 STEPS=5",
            "RANKS=2 STEPS=5 MEMORY",
            "RANKS=2 STEPS=3 DEATH",
            "RANKS=2 STEPS=3 DEATH SPURIOUS",
        )

    def test_three_ranks(self):
        self.check(
            "RANKS=3 STEPS=3",
            "RANKS=3 STEPS=3 MEMORY",
            "RANKS=3 STEPS=2 SPURIOUS",
            "RANKS=3 STEPS=2 DEATH",
        )

    def test_mutations_are_found(self):
        for ranks in (2, 3):
            for mutation in (
                "SLEEPERS_FIRST",
                "NO_COMPARE",
                "SLOTS=2 MEMORY",
                "RECORD_FIRST DEATH",
                "NO_LOOK DEATH",
            ):
                with self.subTest(ranks=ranks, mutation=mutation):
                    self.assertGreater(search(STEP_BARRIER, f"RANKS={ranks}", "STEPS=3", *mutation.split()), 0)


if __name__ == "__main__":
    t.main()
