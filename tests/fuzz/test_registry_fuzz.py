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
    def setUp(self):
        self.folder = self.enterContext(t.temporary_folder())
        self.corpus = self.folder / "corpus"
        self.corpus.mkdir()

    def build(self, sanitizers):
        # Comparisons are not traced: they took half of the time, and the corpus holds all words.
        t.run(CLANG, "-std=c++20", "-O2", "-g1", "-D_GLIBCXX_ASSERTIONS", f"-fsanitize={sanitizers}",
              "-fno-sanitize-coverage=trace-cmp", "-DLOCKSTEP_LIBFUZZER", "-I", t.SOURCE_DIR, *(ROOM / name for name in SOURCES),
              t.BUILD_DIR / "lib/liblockstep.a", "-lcrypto", "-o", self.folder / sanitizers, timeout=600)
        return self.folder / sanitizers

    def fuzz(self, program, runs):
        # Our base library has no sanitizer, so its containers have no marks. What JSON allocates needs no stack of its own.
        env = t.clean_environment(ASAN_OPTIONS="detect_container_overflow=0:malloc_context_size=1:quarantine_size_mb=16",
                                  LOCKSTEP_LOG_LEVEL="error")
        found = t.run(program, self.corpus, f"-runs={runs}", "-max_len=256", "-entropic=0", "-use_counters=0", "-reduce_inputs=0",
                      "-timeout=20", "-print_final_stats=1", env=env, cwd=self.folder, timeout=3000)
        done = int(re.search(r"stat::number_of_executed_units: (\d+)", found.stderr)[1])
        print(f"{done} executions of {program.name}", flush=True)
        self.assertGreaterEqual(done, runs)

    def test_no_input_breaks_it(self):
        t.run(t.BUILD_DIR / "tests/lockstep_elastic_test", "--gtest_filter=RegistryFuzz.EachRequestGetsAnAnswer",
              env=t.clean_environment(LOCKSTEP_FUZZ_CORPUS=self.corpus))
        self.assertGreater(len(list(self.corpus.iterdir())), 10)
        self.fuzz(self.build("fuzzer"), RUNS)
        # What that has found, and some more, with each access to memory checked.
        self.fuzz(self.build("fuzzer,address"), RUNS // 50)


if __name__ == "__main__":
    t.main()
