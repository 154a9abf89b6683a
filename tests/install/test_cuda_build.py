"""The code for CUDA compiles with PyPI's CUDA build of torch and the headers of wheels alone. No GPU is needed."""

import os
import re
import sys
import unittest

import lockstep_testing as t


class CudaBuild(unittest.TestCase):
    @unittest.skipUnless(os.environ.get("LOCKSTEP_LONG_TESTS"), "the long form only (LOCKSTEP_LONG_TESTS=1): it fetches 3 GB")
    def test_nccl_compiles_without_a_toolkit(self):
        version = re.search(r"^torch_version=(\S+)", (t.SOURCE_DIR / "scripts/common.sh").read_text(), re.M).group(1)
        with t.temporary_folder() as folder:
            fetched = t.run(sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--target", folder / "packages",
                            f"torch==={version}", "cuda-toolkit[cccl,crt]", env=dict(os.environ), timeout=1500, check=False)
            if fetched.returncode or not (folder / "packages/torch/lib/libtorch_cuda.so").exists():
                self.skipTest(f"pip has no CUDA build of torch {version}: {fetched.stderr[-300:]}")
            out = t.run("cmake", "-S", t.SOURCE_DIR, "-B", folder / "build", "-G", "Ninja", "-DLOCKSTEP_BUILD_TESTS=OFF",
                        f"-DLOCKSTEP_TORCH={folder}/packages/torch",
                        f"-DLibTorch_CUDA_INCLUDE={folder}/packages/nvidia/cu13/include",  # not a toolkit's
                        timeout=300).stdout
            self.assertIn("(CUDA build: ON)", out)
            self.assertNotIn("Without backend nccl", out)
            t.run("ninja", "-C", folder / "build", "lockstep_comm_nccl", timeout=900)


if __name__ == "__main__":
    t.main()
