"""Checkpoints that Python writes and we read, and the other way round."""

import importlib.util
import os
import shutil
import subprocess
import sys
import unittest

import lockstep_testing as t

for package in ("torch", "safetensors"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: Python's {package} is not installed")
        sys.exit(77)

import torch
from safetensors.torch import load_file

TOOL = t.BUILD_DIR / "tests" / "data_files_tool"
WRITER = t.SOURCE_DIR / "tests" / "interop" / "checkpoint_writer.py"
LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
SIZES = (1, 2, 4)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def write_all(world_size, folder):
    """What checkpoint_writer.py saves in a job of this many ranks."""
    folder.mkdir()
    ranks = [
        subprocess.Popen([sys.executable, str(WRITER), str(rank), str(world_size), str(folder / "meeting"), str(folder)],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=t.clean_environment())
        for rank in range(world_size)
    ]
    try:
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=200)
            if process.returncode != 0:
                raise AssertionError(f"Python's rank {rank} failed:\n{output}")
    finally:
        for process in ranks:
            process.kill()
            process.wait()


class Checkpoints(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = cls.enterClassContext(t.temporary_folder())
        for world_size in SIZES:
            write_all(world_size, cls.folder / str(world_size))

    def setUp(self):
        self.scratch = self.enterContext(t.temporary_folder())

    def assert_same(self, got, wanted):
        self.assertEqual(set(got), set(wanted))
        for name, tensor in wanted.items():
            self.assertEqual(got[name].dtype, tensor.dtype, name)
            self.assertEqual(got[name].shape, tensor.shape, name)
            self.assertTrue(torch.equal(bits(got[name]), bits(tensor)), name)

    def test_what_python_wrote_is_read_whole_and_in_parts(self):
        wanted_of = {"dcp": "dcp", "hf_sharded": "files", "hf_consolidated": "files", "hf_files": "whole",
                     "whole.pt": "whole", "whole.safetensors": "whole"}
        for world_size in SIZES:
            for name, wanted in wanted_of.items():
                with self.subTest(world_size=world_size, name=name):
                    folder, out = self.folder / str(world_size), self.scratch / "out.safetensors"
                    t.run(TOOL, "source", folder / name, out)
                    self.assert_same(load_file(out), load_file(folder / f"{wanted}.safetensors"))

    def damage(self, folder, file, rounds):
        """How many damages of a file are refused, give the same tensors, and give others."""
        seed = os.environ.get("LOCKSTEP_TEST_SEED", str(int.from_bytes(os.urandom(4), "little")))
        print(f"{file}: seed {seed} (set LOCKSTEP_TEST_SEED to repeat)")
        result = t.run(TOOL, "corrupt", folder, file, rounds, seed, timeout=3000)
        return [int(word) for word in result.stdout.split()]

    def test_damage_is_found_or_refused(self):
        """Never a crash. What has checksums never gives other tensors."""
        rounds = 145_000 if LONG else 1450
        four = self.folder / "4"
        for folder, file, has_checksums in ((four / "dcp", ".metadata", False), (four / "dcp", "__3_0.distcp", True),
                                            (four / "whole.pt", "", True), (four / "whole.safetensors", "", False),
                                            (four / "hf_sharded", "shard-00004-model-00001-of-00001.safetensors", False),
                                            (four / "hf_files", "model-00002-of-00003.safetensors", False),
                                            (four / "hf_files", "model.safetensors.index.json", False)):
            with self.subTest(file=file):
                refused, same, others = self.damage(folder, file, rounds)
                self.assertEqual(refused + same + others, rounds)
                self.assertGreater(refused, rounds / 10)
                if has_checksums:
                    self.assertEqual(others, 0)

    def test_missing_files_are_named(self):
        for name, file in (("dcp", "__1_0.distcp"), ("hf_sharded", "shard-00001-model-00001-of-00001.safetensors"),
                           ("hf_files", "model-00002-of-00003.safetensors")):
            with self.subTest(name=name):
                copy = self.scratch / name
                shutil.copytree(self.folder / "2" / name, copy)
                (copy / file).unlink()
                failed = t.run(TOOL, "source", copy, self.scratch / "out.safetensors", check=False)
                self.assertEqual(failed.returncode, 1)
                self.assertIn(str(copy), failed.stderr)


if __name__ == "__main__":
    t.main()
