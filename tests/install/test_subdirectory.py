"""add_subdirectory of the source tree works too: it builds the library anew inside a consumer."""

import unittest

import consumer_test
import lockstep_testing as t


class Subdirectory(unittest.TestCase):
    def test_consumer_with_the_source_tree_inside(self):
        with consumer_test.temporary() as folder:
            consumer_test.build_and_run(self, "subdirectory", folder, f"-DLOCKSTEP_SOURCE_DIR={t.SOURCE_DIR}",
                                        timeout=1300)


if __name__ == "__main__":
    t.main()
