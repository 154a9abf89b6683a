"""The packages of CPack: the .deb is installed into a folder, works there, and leaves nothing when it is removed."""

import os
import shutil
import sys
import tarfile
import unittest

import lockstep_testing as t

TRAIN = ("train", "--model", "mlp", "--dataset", "digits", "--max-epochs", 1, "--limit-train-batches", 3)


def files_below(folder):
    return {path for path in folder.rglob("*") if not path.is_dir()}


class Packages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = cls.enterClassContext(t.temporary_folder())
        t.run("cpack", "--config", t.BUILD_DIR / "CPackConfig.cmake", "-B", cls.folder, timeout=300)
        (cls.deb,) = cls.folder.glob("*.deb")
        (cls.tar,) = cls.folder.glob("*.tar.gz")

    def check_binary(self, prefix):
        self.assertIn("lockstep", t.run(prefix / "bin" / "lockstep", "--version").stdout)
        trained = t.run(prefix / "bin" / "lockstep", *TRAIN, env=t.clean_environment(LOCKSTEP_TORCH=t.LIBTORCH))
        self.assertIn("accuracy", trained.stdout)
        self.assertTrue((prefix / "lib/cmake/Lockstep/LockstepConfig.cmake").exists())
        self.assertTrue((prefix / "include/lockstep/lockstep.h").exists())

    def test_it_depends_on_what_it_links(self):
        depends = t.run("dpkg-deb", "--field", self.deb, "Depends").stdout
        for package in ("libc6", "libcurl4", "libssl3", "libstdc++6"):
            self.assertIn(package, depends)
        self.assertNotIn("torch", depends)

    def test_it_is_installed_and_removed(self):
        root, state, commands = self.folder / "root", self.folder / "root" / "dpkg", self.folder / "commands"
        for path in (state / "info", state / "updates", commands):
            path.mkdir(parents=True)
        (state / "status").touch()
        # What the package runs when it is installed must not run for the machine.
        (commands / "ldconfig").symlink_to(shutil.which("true"))
        # Its dependencies are the machine's, which this state does not know.
        dpkg = ("env", f"PATH={commands}:{os.environ['PATH']}", "dpkg", f"--instdir={root}", f"--admindir={state}",
                "--force-not-root", "--force-depends", "--force-bad-path", "--force-script-chrootless",
                f"--log={self.folder / 'log'}")
        t.run(*dpkg, "--install", self.deb)
        self.check_binary(root / "usr")
        self.assertIn("lockstep", t.run("dpkg-query", f"--admindir={state}", "-W").stdout)
        t.run(*dpkg, "--purge", "lockstep")
        self.assertEqual(files_below(root) - files_below(state), set())

    def test_the_tar_runs_where_it_is_unpacked(self):
        with tarfile.open(self.tar) as archive:
            archive.extractall(self.folder / "tar")
        (prefix,) = (self.folder / "tar").iterdir()
        self.check_binary(prefix)


if __name__ == "__main__":
    if not all(map(shutil.which, ("dpkg-deb", "dpkg-shlibdeps", "cpack"))) or t.SANITIZED:
        print("skipped: no dpkg-dev or cpack, or a build with a sanitizer")
        sys.exit(77)
    t.main()
