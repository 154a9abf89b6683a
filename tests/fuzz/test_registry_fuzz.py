"""The embedded registry's parser under libFuzzer, in the long form: registry_fuzz_test.cpp has its target and its corpus."""

import os
import re
import shutil
import unittest

import lockstep_testing as t

CLANG = next(filter(None, map(shutil.which, ("clang++", "clang++-14"))), None)
ROOM = t.SOURCE_DIR / "lockstep/elastic"
SOURCES = ["registry_fuzz_test.cpp", "embedded_store.cpp", "gateway.cpp", "proof.cpp"]
RUNS = int(os.environ.get("LOCKSTEP_FUZZ_RUNS", 10_000_000))


@unittest.skipUnless(os.environ.get("LOCKSTEP_LONG_TESTS"), "the long form alone: LOCKSTEP_LONG_TESTS=1")
@unittest.skipUnless(CLANG, "clang is not installed")
class Registry(unittest.TestCase):
    def test_no_input_breaks_it(self):
        with t.temporary_folder() as folder:
            corpus = folder / "corpus"
            corpus.mkdir()
            t.run(t.BUILD_DIR / "tests/lockstep_elastic_test", "--gtest_filter=RegistryFuzz.EachRequestGetsAnAnswer",
                  env=t.clean_environment(LOCKSTEP_FUZZ_CORPUS=corpus))
            self.assertGreater(len(list(corpus.iterdir())), 10)
            t.run(CLANG, "-std=c++20", "-O2", "-g", "-fsanitize=fuzzer,address", "-DLOCKSTEP_LIBFUZZER", "-I", t.SOURCE_DIR,
                  *(ROOM / name for name in SOURCES), t.BUILD_DIR / "lib/liblockstep.a", "-lcrypto", "-o",
                  folder / "fuzz", timeout=600)
            # Our base library has no sanitizer, so its containers have no marks.
            env = t.clean_environment(ASAN_OPTIONS="detect_container_overflow=0", LOCKSTEP_LOG_LEVEL="error")
            found = t.run(folder / "fuzz", corpus, f"-runs={RUNS}", "-max_len=4096", "-timeout=20", "-print_final_stats=1",
                          env=env, cwd=folder, timeout=3600)
            done = int(re.search(r"stat::number_of_executed_units: (\d+)", found.stderr)[1])
            print(f"{done} executions", flush=True)
            self.assertGreaterEqual(done, RUNS)


if __name__ == "__main__":
    t.main()
