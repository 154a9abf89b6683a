"""The readers of safetensors, pickle, zip, .metadata, indexes and checkpoints' descriptions under libFuzzer, in the long form:
file_fuzzer.cpp."""

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
# Each input is a file. A folder in memory takes a tenth of the time of one on a disk.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


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
    t.run(t.LOCKSTEP, "train", "--model", "linear", "--dataset", "random", "--max-epochs", 1, "--limit-train-batches", 1,
          "--checkpoint-dir", folder / "run")
    return {"model-00001-of-00002.safetensors": hf, "model.safetensors.index.json": hf, ".metadata": distributed,
            "__0_0.distcp": distributed, "x.pt": pt, "pickle": distributed, "state.json": folder / "run/latest"}


@unittest.skipUnless(os.environ.get("LOCKSTEP_LONG_TESTS"), "the long form alone: LOCKSTEP_LONG_TESTS=1")
@unittest.skipUnless(CLANG, "clang is not installed")
@unittest.skipUnless(importlib.util.find_spec("safetensors"), "Python's safetensors is not installed")
class Files(unittest.TestCase):

    def build(self, folder, sanitizers):
        import torch

        root = t.pathlib.Path(torch.__file__).parent
        program = folder / sanitizers
        # Comparisons are not traced, which takes half of the time: the corpus has the words of each format.
        t.run(CLANG, "-std=c++20", "-O2", "-g1", "-D_GLIBCXX_ASSERTIONS", f"-fsanitize={sanitizers}",
              "-fno-sanitize-coverage=trace-cmp", "-I", t.SOURCE_DIR, "-isystem", root / "include", "-isystem",
              root / "include/torch/csrc/api/include", t.SOURCE_DIR / "tests/fuzz/file_fuzzer.cpp",
              *(ROOM / f"{name}.cpp" for name in SOURCES), t.SOURCE_DIR / "lockstep/checkpoint/stored_checkpoint.cpp",
              t.BUILD_DIR / "lib/liblockstep.a", "-L", root / "lib", f"-Wl,-rpath,{root / 'lib'}",
              "-ltorch", "-ltorch_cpu", "-lc10", "-lisal", "-lcrypto", "-o", program, timeout=1800)
        return program

    def fuzz(self, program, name, whole, corpus, runs):
        # Our base library and LibTorch have no sanitizer, so their containers have no marks.
        env = t.clean_environment(ASAN_OPTIONS="detect_container_overflow=0:detect_odr_violation=0",
                                  LOCKSTEP_FUZZ_FORMAT=name, LOCKSTEP_FUZZ_FOLDER=whole, LOCKSTEP_LOG_LEVEL="error",
                                  OMP_NUM_THREADS="1", TMPDIR=corpus.parent)
        found = t.run(program, corpus, f"-runs={runs}", "-max_len=8192", "-timeout=60", "-print_final_stats=1", env=env,
                      cwd=corpus.parent, timeout=5400)
        done = int(re.search(r"stat::number_of_executed_units: (\d+)", found.stderr)[1])
        print(f"{name}: {done} executions of {program.name}", flush=True)
        self.assertGreaterEqual(done, runs)

    def test_no_input_breaks_them(self):
        with t.temporary_folder() as folder, t.tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
            fast, checked = self.build(folder, "fuzzer"), self.build(folder, "fuzzer,address")
            seeds = write_seeds(folder)
            for name, whole in seeds.items():
                corpus = t.pathlib.Path(scratch) / f"corpus of {name}"
                corpus.mkdir()
                shutil.copy(whole / (".metadata" if name == "pickle" else name), corpus / "seed")
                with self.subTest(name):
                    self.fuzz(fast, name, whole, corpus, RUNS // len(seeds))
                    # What that has found, and some more, with each access to memory checked.
                    self.fuzz(checked, name, whole, corpus, RUNS // 100 // len(seeds))


if __name__ == "__main__":
    t.main()
