"""What the other tests here look with sees what it should: our shared memory has no name in /dev/shm."""

import mmap
import os
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


if __name__ == "__main__":
    t.main()
