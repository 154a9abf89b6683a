"""cmake --install gives a package that find_package(Lockstep) finds, and a binary that runs."""

import pathlib
import unittest

import consumer_test
import lockstep_testing as t


class Package(unittest.TestCase):
    def test_installed_package_builds_and_runs_a_consumer(self):
        with consumer_test.temporary() as folder:
            prefix = pathlib.Path(folder) / "prefix"
            t.run("cmake", "--install", t.BUILD_DIR, "--prefix", prefix)
            consumer_test.build_and_run(self, "package", folder, f"-DCMAKE_PREFIX_PATH={prefix}", timeout=300)
            version = t.run(prefix / "bin" / "lockstep", "--version").stdout
            self.assertIn("lockstep", version.lower())
            shown = t.run(prefix / "bin" / "lockstep", "env").stdout
            self.assertIn("gloo", shown)


if __name__ == "__main__":
    t.main()
