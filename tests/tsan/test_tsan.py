"""What several threads share under ThreadSanitizer: no race, and the tests pass."""

import subprocess
import unittest

import lockstep_testing as t

SUPPRESSIONS = t.SOURCE_DIR / "tests" / "tsan" / "suppressions.txt"


class ThreadSanitizer(unittest.TestCase):
    def check(self, program, *flags, options=""):
        env = t.clean_environment(TSAN_OPTIONS=f"halt_on_error=0 exitcode=66 {options}")
        done = subprocess.run([t.BUILD_DIR / "tests" / program, "--gtest_brief=1", *flags], env=env, text=True,
                              capture_output=True, timeout=280)
        out = done.stdout + done.stderr
        if "unexpected memory mapping" in out:
            self.skipTest("ThreadSanitizer does not start here: " + out.strip().splitlines()[0])
        self.assertEqual(done.returncode, 0, out[-6000:])
        self.assertIn("PASSED", out)


class ProtocolsOfSharedMemory(ThreadSanitizer):
    def test_no_races(self):
        # A child of fork is no thread that the sanitizer knows.
        self.check("lockstep_shm_tsan", "--gtest_filter=-*AKilled*")


class Backends(ThreadSanitizer):
    def test_no_races(self):
        self.check("lockstep_backends_tsan", options=f"suppressions={SUPPRESSIONS} ignore_noninstrumented_modules=1")


if __name__ == "__main__":
    t.main()
