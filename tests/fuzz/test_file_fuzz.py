"""The readers of safetensors, pickle, zip, .metadata and the index under libFuzzer, in the long form: file_fuzzer.cpp."""

import importlib.util
import os
import re
import shutil
import unittest

import lockstep_testing as t

CLANG = next(filter(None, map(shutil.which, ("clang++", "clang++-14"))), None)
RUNS = int(os.environ.get("LOCKSTEP_FUZZ_RUNS", 10_000_000))
ROOM = t.SOURCE_DIR / "lockstep/data"
SOURCES = ("content_reader dcp_folder dtype_names pickle pt_file safetensors safetensors_folder stored_tensors "
           "tensor_bytes tensor_reader zip").split()


def write_seeds(folder):
    """A folder for each reader, and the name of the file that the fuzzer replaces."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    tied = torch.rand(3, 4)
    tensors = {"a": tied, "b": torch.arange(3), "c": torch.rand(5).to(torch.bfloat16), "d": torch.ones(4) > 0}
    hf, distributed, pt = (folder / name for name in ("hf", "dcp", "pt"))
    dcp.save(tensors, no_dist=True, storage_writer=HuggingFaceStorageWriter(hf, {"a": 1, "b": 1, "c": 2, "d": 2}))
    dcp.save({"model": tensors, "lr": 0.5, "betas": (0.5, 1)}, no_dist=True, checkpoint_id=distributed)
    pt.mkdir()
    torch.save({"model": tensors, "tied": tied, "view": tied.t()[1:], "lr": 0.5, "list": [None, True, "x"]}, pt / "x.pt")
    return {"model-00001-of-00002.safetensors": hf, "model.safetensors.index.json": hf, ".metadata": distributed,
            "__0_0.distcp": distributed, "x.pt": pt, "pickle": distributed}


@unittest.skipUnless(os.environ.get("LOCKSTEP_LONG_TESTS"), "the long form alone: LOCKSTEP_LONG_TESTS=1")
@unittest.skipUnless(CLANG, "clang is not installed")
@unittest.skipUnless(importlib.util.find_spec("safetensors"), "Python's safetensors is not installed")
class Files(unittest.TestCase):

    def build(self, folder):
        import torch

        root = t.pathlib.Path(torch.__file__).parent
        t.run(CLANG, "-std=c++20", "-O1", "-g", "-fsanitize=fuzzer,address", "-I", t.SOURCE_DIR, "-isystem",
              root / "include", "-isystem", root / "include/torch/csrc/api/include",
              t.SOURCE_DIR / "tests/fuzz/file_fuzzer.cpp", *(ROOM / f"{name}.cpp" for name in SOURCES),
              t.BUILD_DIR / "lib/liblockstep.a", "-L", root / "lib", f"-Wl,-rpath,{root / 'lib'}",
              "-ltorch", "-ltorch_cpu", "-lc10", "-lisal", "-lcrypto", "-o", folder / "fuzz", timeout=1800)

    def test_no_input_breaks_them(self):
        with t.temporary_folder() as folder:
            self.build(folder)
            seeds = write_seeds(folder)
            runs = RUNS // len(seeds)
            for name, whole in seeds.items():
                corpus = folder / f"corpus of {name}"
                corpus.mkdir()
                shutil.copy(whole / (".metadata" if name == "pickle" else name), corpus / "seed")
                # Our base library and LibTorch have no sanitizer, so their containers have no marks.
                env = t.clean_environment(ASAN_OPTIONS="detect_container_overflow=0:detect_odr_violation=0",
                                          LOCKSTEP_FUZZ_FORMAT=name, LOCKSTEP_FUZZ_FOLDER=whole)
                with self.subTest(name):
                    found = t.run(folder / "fuzz", corpus, f"-runs={runs}", "-max_len=8192", "-timeout=20",
                                  "-print_final_stats=1", env=env, cwd=folder, timeout=3600)
                    done = int(re.search(r"stat::number_of_executed_units: (\d+)", found.stderr)[1])
                    print(f"{name}: {done} executions", flush=True)
                    self.assertGreaterEqual(done, runs)


if __name__ == "__main__":
    t.main()
