"""What the other tests here look with sees what it should: our shared memory has no name in /dev/shm."""

import mmap
import os
import subprocess
import sys
import unittest

import left_behind
import lockstep_testing as t


class Seen(unittest.TestCase):

    def setUp(self):
        self.before = left_behind.LeftBehind()
        self.addCleanup(setattr, left_behind, "PATIENCE", left_behind.PATIENCE)
        left_behind.PATIENCE = 0.1

    def test_memory_without_a_name_held_by_a_descriptor_or_a_mapping(self):
        fd = os.memfd_create("lockstep")
        os.ftruncate(fd, mmap.PAGESIZE)
        with self.assertRaisesRegex(AssertionError, "memfd"):
            self.before.expect_nothing()
        with mmap.mmap(fd, mmap.PAGESIZE):
            os.close(fd)
            with self.assertRaisesRegex(AssertionError, "memfd"):
                self.before.expect_nothing()
        left_behind.PATIENCE = 10
        self.before.expect_nothing()

    def test_memory_of_processes_that_it_has_started_and_not_of_others(self):
        hold = "import os, sys; os.memfd_create('lockstep'); print('held', flush=True); sys.stdin.read()"
        others = {name: value for name, value in os.environ.items() if name != t.JOB_MARK.split("=")[0]}
        for env, seen in ((None, True), (others, False)):
            with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  env=env) as process:
                process.stdout.readline()
                self.assertEqual(bool(left_behind.nameless_memory()), seen)
                process.stdin.close()


if __name__ == "__main__":
    t.main()
