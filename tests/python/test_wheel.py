"""The wheel is built, installed into a fresh virtual environment, and refuses what does not fit."""

import os
import shutil
import unittest
import zipfile

import lockstep_testing as t
import wheel_testing as w

w.require_tools()

LONG = os.environ.get("LOCKSTEP_LONG_TESTS") == "1"


class Wheel(unittest.TestCase):
    """The order of the names is the order in which they run."""

    def test_1_build_and_install(self):
        wheels = w.FOLDER / "wheel"
        shutil.rmtree(wheels, ignore_errors=True)
        # The long form compiles all that the wheel needs, as a user's `pip install .` does.
        library = "" if LONG else t.BUILD_DIR / "lib" / "liblockstep.a"
        w.pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", wheels,
              "--config-settings", f"build-dir={w.FOLDER / 'build'}",
              "--config-settings", f"cmake.define.LOCKSTEP_WHEEL_LIBRARY={library}", t.SOURCE_DIR, timeout=850)
        (wheel,) = wheels.glob("lockstep-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        for name in ("__init__.py", "_C.pyi", "py.typed"):
            self.assertIn(f"lockstep/{name}", names)
        self.assertIn("lockstep_autoload.py", names)
        self.assertEqual([n for n in names if n.endswith(".so") and "/_C." in n][1:], [])
        self.assertEqual([n for n in names if n.endswith(".data/scripts/lockstep")][1:], [])
        self.assertFalse([n for n in names if n.startswith(("include/", "lib/"))], names)
        w.make_venv()
        w.pip("--python", w.PYTHON, "install", "--no-deps", "--no-index", wheel)

    def test_2_another_torch_is_refused_with_both_versions(self):
        import torch

        for version in ("2.9.1", "99.0.0+cu130"):
            result = t.run(w.PYTHON, "-c", f"import torch; torch.__version__ = '{version}'; import lockstep",
                           check=False)
            self.assertNotEqual(result.returncode, 0)
            said = result.stderr.strip()
            self.assertIn(f"was built with torch {torch.__version__}, but this is torch {version}", said)
            self.assertIn("hint:", said)

    def test_3_torch_knows_the_backend_without_an_import(self):
        said = t.run(w.PYTHON, "-c", "import sys, torch.distributed as dist; "
                     "print(dist.Backend('lockstep') in dist.Backend.backend_list, 'lockstep' in sys.modules)").stdout
        self.assertEqual(said.split(), ["True", "False"])

    def test_4_import_makes_it_known_where_entry_points_are_off(self):
        said = t.run(w.PYTHON, "-c", "import torch.distributed as dist; print('lockstep' in dist.Backend.backend_list);"
                     "import lockstep; print('lockstep' in dist.Backend.backend_list, lockstep.__version__)",
                     env=t.clean_environment(TORCH_DEVICE_BACKEND_AUTOLOAD=0)).stdout.split()
        self.assertEqual(said[:2], ["False", "True"])
        self.assertIn(said[2], t.run(t.LOCKSTEP, "--version").stdout)

    def test_5_lockstep_run_starts_ranks_with_its_own_python(self):
        """Two ranks meet in the launcher's store, over the default init method, with Python's flags."""
        lockstep = w.PYTHON.parent / "lockstep"
        path = os.environ["PATH"].replace(str(w.PYTHON.parent), "")
        said = t.run(lockstep, "run", "--standalone", "--nproc-per-node", 2, w.HERE / "launched_rank.py", "a b",
                     env=t.clean_environment(PATH=path)).stdout
        self.assertEqual(sorted(line.split("]: ")[1] for line in said.splitlines()),
                         [f"rank {rank}: 3.0, ['a b'], {w.PYTHON}" for rank in (0, 1)])
        self.assertIn("run", t.run(lockstep, "--help").stdout)
        refused = t.run(lockstep, "train", check=False)
        self.assertEqual(refused.returncode, 2)
        self.assertIn("make install", refused.stderr)

    def test_6_the_example_learns(self):
        said = t.run(w.PYTHON.parent / "lockstep", "run", "--standalone", "--nproc-per-node", 2,
                     t.SOURCE_DIR / "examples" / "python" / "ddp.py").stdout
        self.assertIn("over shm: all 2 ranks share one host", said)
        self.assertGreater(float(said.split("epoch 3: accuracy ")[1].split(",")[0]), 0.85)


if __name__ == "__main__":
    t.main()
