"""The wheel is built, installed into a fresh virtual environment, and refuses what does not fit."""

import importlib.util
import os
import pathlib
import sys
import unittest
import zipfile

import lockstep_testing as t
import wheel_testing as w

w.require_tools()

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(outside LANGUAGES C CXX)
find_package(Lockstep REQUIRED)
add_executable(consumer ${SOURCE})
target_link_libraries(consumer PRIVATE Lockstep::lockstep)
"""


class Wheel(unittest.TestCase):
    """The order of the names is the order in which they run."""

    def test_1_build_and_install(self):
        t.run(t.SOURCE_DIR / "scripts" / "wheel.sh", os.cpu_count(), t.BUILD_DIR, timeout=850,
              env={**os.environ, "VIRTUAL_ENV": sys.prefix})
        wheels = t.BUILD_DIR / "wheel"
        (wheel,) = wheels.glob("lockstep-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        for name in ("__init__.py", "_C.pyi", "py.typed", "bin/lockstep", "lib/liblockstep.so",
                     "lib/cmake/Lockstep/LockstepConfig.cmake", "include/lockstep/lockstep.h",
                     "include/nlohmann/json.hpp"):
            self.assertIn(f"lockstep/{name}", names)
        self.assertIn("lockstep_autoload.py", names)
        self.assertEqual([n for n in names if n.endswith(".so") and "/_C." in n][1:], [])
        bundled = [n.split("/")[1].split("-")[0] for n in names if n.startswith("lockstep.libs/")]
        self.assertIn("libcurl", bundled)
        self.assertEqual([n for n in bundled if n.startswith(("libtorch", "libc10", "libmpi"))], [])
        w.make_venv()
        w.pip("--python", w.PYTHON, "install", "--no-deps", "--no-index", wheel)

    def test_2_another_torch_is_refused_with_both_versions(self):
        import torch

        versions = ("2.9.1", "99.0.0+cu130")
        said = t.run(w.PYTHON, "-c", f"""import torch
for torch.__version__ in {versions}:
    try:
        import lockstep
    except ImportError as error:
        print(error)""").stdout
        for version in versions:
            self.assertIn(f"was built with torch {torch.__version__}, but this is torch {version}\n  hint:", said)

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

    def test_6_the_example_learns(self):
        said = t.run(w.PYTHON.parent / "lockstep", "run", "--standalone", "--nproc-per-node", 2,
                     t.SOURCE_DIR / "examples" / "python" / "ddp.py").stdout
        self.assertIn("over shm: all 2 ranks share one host", said)
        self.assertGreater(float(said.split("epoch 3: accuracy ")[1].split(",")[0]), 0.85)

    def test_7_the_binary_has_every_command(self):
        lockstep = w.PYTHON.parent / "lockstep"
        self.assertEqual(t.run(lockstep, "--help").stdout, t.run(t.LOCKSTEP, "--help").stdout)
        for command in ("bench", "checkpoint", "env"):
            t.run(lockstep, command, "--help")
        train = ("train", "--model", "mlp", "--dataset", "digits", "--devices", 2, "--max-epochs", 1,
                 "--limit-train-batches", 5, "--seed", 0)
        said = t.run(lockstep, *train).stdout
        self.assertEqual(said.splitlines()[-1], t.run(t.LOCKSTEP, *train).stdout.splitlines()[-1])

    def test_8_the_binary_finds_libtorch_or_says_where_it_looked(self):
        binary = w.package_folder() / "lockstep" / "bin" / "lockstep"
        torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
        alone = t.clean_environment()
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            alone.pop(name, None)
        for found in ({"LOCKSTEP_TORCH": str(torch)}, {"VIRTUAL_ENV": str(torch.parents[3])}):
            t.run(binary, "env", env={**alone, **found})
        beside = w.package_folder() / "torch"
        beside.symlink_to(torch)
        self.addCleanup(beside.unlink, missing_ok=True)
        t.run(binary, "env", env=alone)
        beside.unlink()
        looked = t.run(binary, "env", env={**alone, "VIRTUAL_ENV": "/nowhere"}, check=False)
        self.assertNotEqual(looked.returncode, 0)
        self.assertIn(str(w.package_folder() / "torch"), looked.stderr)
        with t.temporary_folder() as folder:  # A LibTorch of another version.
            header = folder / "include/torch/headeronly/version.h"
            header.parent.mkdir(parents=True)
            header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 1\n")
            (folder / "lib").mkdir()
            (folder / "lib/libtorch.so").touch()
            looked = t.run(binary, "env", env={**alone, "LOCKSTEP_TORCH": str(folder)}, check=False)
            self.assertNotEqual(looked.returncode, 0)
            self.assertIn(f"{folder}: version 2.1\n", looked.stderr)

    def test_9_a_program_is_built_against_it(self):
        prefix = t.run(w.PYTHON, "-m", "lockstep", "--cmake-prefix-path").stdout.strip()
        with t.temporary_folder() as folder:
            (folder / "CMakeLists.txt").write_text(PROJECT)
            source = t.SOURCE_DIR / "tests" / "install" / "subdirectory" / "consumer.cpp"
            t.run("cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}",
                  f"-DSOURCE={source}", env=t.clean_environment())
            t.run("cmake", "--build", folder / "build", timeout=300)
            self.assertEqual(t.run(folder / "build" / "consumer").stdout, "consumer: 2 ranks, sum 3\n")


if __name__ == "__main__":
    t.main()
