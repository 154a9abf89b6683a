"""The shared-memory protocols under ThreadSanitizer: no race, and the tests pass."""

import subprocess
import unittest

import lockstep_testing as t

PROGRAM = t.BUILD_DIR / "tests" / "lockstep_shm_tsan"


class ThreadSanitizer(unittest.TestCase):
    def test_no_races(self):
        env = t.clean_environment(TSAN_OPTIONS="halt_on_error=0 exitcode=66")
        # A child of fork is no thread that the sanitizer knows.
        done = subprocess.run([PROGRAM, "--gtest_brief=1", "--gtest_filter=-*AKilled*"], env=env, text=True,
                              capture_output=True, timeout=280)
        out = done.stdout + done.stderr
        if "unexpected memory mapping" in out:
            self.skipTest("ThreadSanitizer does not start here: " + out.strip().splitlines()[0])
        self.assertEqual(done.returncode, 0, out[-6000:])
        self.assertIn("PASSED", out)


if __name__ == "__main__":
    t.main()
