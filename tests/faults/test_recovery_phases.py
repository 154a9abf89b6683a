"""Every kind of fault in every phase of a step and of a recovery, with every strategy. The weights are those of a run
that nobody disturbed. The short form makes a random choice of them."""

import functools
import os
import random
import subprocess
import unittest

import lockstep_testing as t
from left_behind import LeftBehind

SEED = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
LONG = bool(os.environ.get("LOCKSTEP_LONG_TESTS"))
TRAINER_RANK = t.BUILD_DIR / "tests" / "lockstep_trainer_recovery_rank"
RANKS, EPOCHS, STEPS = 3, 2, 48  # Steps of an epoch.
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
KINDS = ("kill", "exit", "exception", "stop")
OF_STEP = ("forward", "bucket", "before-step", "in-step", "finished", "save", "evaluation")
# After another rank has failed: as the others leave, as they form a group, as a rank gives its state.
OF_RECOVERY = ("meeting", "recovering", "giving")


def run(strategy, *faults):
    """The weights of all ranks, and the launcher's words."""
    with t.temporary_folder() as folder:
        words = [TRAINER_RANK, folder, RANKS, 6, EPOCHS, strategy, *faults]
        timeout = 3 if any(":stop:" in fault for fault in faults) else 60
        result = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=240,
                                env=t.clean_environment(OMP_NUM_THREADS="1", LOCKSTEP_TIMEOUT=timeout))
        missing = [fault for fault in faults if not (folder / f"fault-{fault}").exists()]
        ends = {path.read_text() for path in folder.glob("end-*")}
        return result.returncode, ends, missing, result.stderr


@functools.cache
def undisturbed(strategy):
    code, ends, _, errors = run(strategy)
    assert (code, len(ends)) == (0, 1), errors
    return ends


class RecoveryPhases(unittest.TestCase):
    def setUp(self):
        self.left = LeftBehind()
        self.random = random.Random(SEED)
        print(f"LOCKSTEP_FAULT_SEED={SEED}", flush=True)

    def tearDown(self):
        self.left.expect_nothing()

    def faults(self, phase, kind):
        rank = self.random.randrange(RANKS)
        # Saves are made every five steps. The survivors of an earlier step may have none yet, and nothing to give.
        step = 5 * self.random.randrange(1, 19) if phase == "save" else self.random.randrange(3, STEPS * EPOCHS)
        if phase in OF_STEP:
            return [f"{phase}:{kind}:{STEPS if phase == 'evaluation' else step}:{rank}"]
        generation = 0 if phase == "meeting" else 1
        return [f"forward:kill:{step}:{rank}", f"{phase}:{kind}:{generation}:any"]

    def check(self, strategy, phase, kind):
        faults = self.faults(phase, kind)
        with self.subTest(strategy=strategy, faults=faults):
            code, ends, missing, errors = run(strategy, *faults)
            self.assertEqual((code, missing), (0, []), errors)
            self.assertIn("a new process takes its place", errors)
            self.assertNotIn("all ranks start again", errors)
            self.assertEqual(ends, undisturbed(strategy), errors)

    def test_faults(self):
        every = [(strategy, phase, kind) for strategy in STRATEGIES for phase in OF_STEP + OF_RECOVERY for kind in KINDS]
        self.random.shuffle(every)
        if not LONG:
            # Who stands still is noticed by a time-out.
            quick = [fault for fault in every if fault[2] != "stop"]
            slow = [fault for fault in every if fault[2] == "stop"]
            every = [next(fault for fault in quick if fault[1] == phase) for phase in OF_STEP + OF_RECOVERY] + slow[:1]
        for fault in every:
            self.check(*fault)


if __name__ == "__main__":
    unittest.main()
