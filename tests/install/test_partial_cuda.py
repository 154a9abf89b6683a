"""A CUDA build of LibTorch beside a part of a CUDA toolkit: configuring goes on without NCCL, and says why."""

import os
import pathlib
import unittest

import lockstep_testing as t

SOURCE = pathlib.Path(os.environ["LOCKSTEP_SOURCE_DIR"])
TORCH = pathlib.Path(os.environ["LOCKSTEP_LIBTORCH"])


def cuda_build_of(torch, folder):
    """A folder that looks as a CUDA build does."""
    (folder / "lib").mkdir(parents=True)
    for entry in torch.iterdir():
        if entry.name != "lib":
            (folder / entry.name).symlink_to(entry)
    for library in (torch / "lib").iterdir():
        (folder / "lib" / library.name).symlink_to(library)
    for name in ("libtorch_cuda.so", "libc10_cuda.so"):
        if not (folder / "lib" / name).exists():
            (folder / "lib" / name).symlink_to(torch / "lib/libc10.so")


class PartialCuda(unittest.TestCase):
    def test_configuring_goes_on_without_nccl(self):
        with t.temporary_folder() as folder:
            cuda_build_of(TORCH, folder / "torch")
            toolkit, nccl = folder / "toolkit/include", folder / "nvidia/nccl/include"
            for path in (toolkit / "cuda_runtime_api.h", nccl / "nccl.h"):
                path.parent.mkdir(parents=True)
                path.touch()
            out = t.run("cmake", "-S", SOURCE, "-B", folder / "build", f"-DLOCKSTEP_TORCH={folder / 'torch'}",
                        "-DLOCKSTEP_BUILD_TESTS=OFF", env={**os.environ, "CUDA_HOME": str(toolkit.parent), "VIRTUAL_ENV": ""}).stdout
            self.assertIn("(CUDA build: ON)", out)
            self.assertRegex(out, r"Without backend nccl: .* error: \S+\.h: No such file")


if __name__ == "__main__":
    t.main()
