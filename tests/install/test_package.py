"""cmake --install gives a package: a binary that runs, the public headers and no others, and a library on
which the examples build as a user's own programs do.

What all of them include is read. Of the headers that are compiled alone some are drawn, as a header takes two seconds.
LOCKSTEP_TEST_SEED repeats a draw. LOCKSTEP_LONG_TESTS=1 takes all headers, and compiles all examples: one takes twelve."""

import concurrent.futures
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import unittest

import consumer_test
import lockstep_testing as t

# Linked and run. The others are compiled to no output, which takes less time.
BUILT = ("quickstart/distributed", "quickstart/rpc")
LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
SEED = int(os.environ.get("LOCKSTEP_TEST_SEED") or random.randrange(1 << 30))


def on_some(count, check, items):
    """All in the long form."""
    drawn = sorted(items) if LONG else random.Random(SEED).sample(sorted(items), count)
    print(f"LOCKSTEP_TEST_SEED={SEED}: {len(drawn)} of {len(items)}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(check, drawn))


def has_rpc(file):
    """Whether it defines a function of RPC."""
    return "N8lockstep3rpc" in t.run("nm", "--defined-only", file).stdout


COMPONENTS = """cmake_minimum_required(VERSION 3.25)
project(components LANGUAGES C CXX)
find_package(Lockstep REQUIRED)
if(TARGET Lockstep::rpc)
  message(FATAL_ERROR "Lockstep::rpc is there, though nobody asked for it")
endif()
find_package(Lockstep COMPONENTS telepathy)
if(Lockstep_FOUND)
  message(FATAL_ERROR "an unknown component was found")
endif()
find_package(Lockstep REQUIRED COMPONENTS rpc OPTIONAL_COMPONENTS telepathy)
if(NOT TARGET Lockstep::rpc OR NOT Lockstep_rpc_FOUND OR Lockstep_telepathy_FOUND)
  message(FATAL_ERROR "rpc was asked for")
endif()
"""


class Package(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(consumer_test.temporary()))
        cls.prefix, cls.examples, cls.build = folder / "prefix", folder / "examples", folder / "build"
        cls.env = consumer_test.consumer_environment()
        t.run("cmake", "--install", t.BUILD_DIR, "--prefix", cls.prefix)
        # Away from the source tree, so that nothing of it is found by a relative path.
        shutil.copytree(t.SOURCE_DIR / "examples", cls.examples)
        t.run("cmake", "-S", cls.examples, "-B", cls.build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={cls.prefix}",
              "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", env=cls.env)
        cls.commands = {str(pathlib.Path(entry["file"]).relative_to(cls.examples)): shlex.split(entry["command"])
                        for entry in json.loads((cls.build / "compile_commands.json").read_text())}

    def check_syntax(self, command, source):
        """Compiles the source by the command of one of the examples."""
        words = command[:command.index("-o")] + ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
        t.run(*words, "-fsyntax-only", source, timeout=300, env=self.env)

    def installed_headers(self):
        include = self.prefix / "include"
        return sorted(str(path.relative_to(include)) for path in include.rglob("*") if path.is_file())

    def test_binary(self):
        self.assertIn("lockstep", t.run(self.prefix / "bin" / "lockstep", "--version").stdout.lower())
        self.assertIn("gloo", t.run(self.prefix / "bin" / "lockstep", "env").stdout)

    def test_only_the_installed_headers_are_on_the_include_path(self):
        for name, command in self.commands.items():
            paths = [pathlib.Path(p) for p in re.findall(r"-(?:I|isystem) ?(\S+)", " ".join(command))]
            self.assertEqual([p for p in paths if (p / "lockstep").exists()], [self.prefix / "include"], name)

    def test_every_example_compiles(self):
        programs = sorted(str(path.relative_to(self.examples)) for path in self.examples.rglob("*.cpp"))
        if not shutil.which("mpirun"):
            programs.remove("mpi_simulation/heat.cpp")
        self.assertEqual(sorted(self.commands), programs)
        self.assertLessEqual({f"{name}.cpp" for name in BUILT}, set(programs))
        if LONG:
            on_some(len(programs), lambda name: self.check_syntax(self.commands[name], self.examples / name),
                    [name for name in programs if name.removesuffix(".cpp") not in BUILT])

    def test_examples_run(self):
        t.run("cmake", "--build", self.build, "--target", *("example_" + name.replace("/", "_") for name in BUILT),
              timeout=400, env=self.env)
        for name in BUILT:
            t.run(self.build / name, timeout=120, env=t.clean_environment(LOCKSTEP_DATA_DIR="/nowhere"))
            self.assertEqual(has_rpc(self.build / name), name == "quickstart/rpc", name)

    def test_rpc_is_a_component(self):
        libraries = {path.name: has_rpc(path) for path in self.prefix.rglob("liblockstep*.a")}
        self.assertEqual(libraries, {"liblockstep.a": False, "liblockstep_rpc.a": True})
        project = self.build / "components"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(COMPONENTS)
        said = t.run("cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={self.prefix}", env=self.env)
        self.assertIn("no component 'telepathy'; its only one is rpc", " ".join(said.stderr.split()))

    def test_the_page_lists_the_installed_headers(self):
        page = (t.SOURCE_DIR / "docs" / "headers.md").read_text()
        self.assertEqual(sorted(re.findall(r"^\| `(lockstep/[^`]+)` \| \S", page, re.M)), self.installed_headers())

    def test_each_header_compiles_alone(self):
        command = next(iter(self.commands.values()))
        folder = self.build / "alone"
        folder.mkdir()

        def check(header):
            source = folder / (header.replace("/", "_") + ".cpp")
            source.write_text(f'#include "{header}"\n')
            self.check_syntax(command, source)

        on_some(4, check, self.installed_headers())

    def test_only_installed_headers_are_included(self):
        installed = set(self.installed_headers())
        sources = [*self.examples.rglob("*.cpp"), *self.examples.rglob("*.h"), *(self.prefix / "include" / name for name in installed)]
        included = {source: set(re.findall(r'#\s*include\s*["<](lockstep/[^">]+)', source.read_text())) for source in sources}
        self.assertEqual({str(source): names - installed for source, names in included.items() if names - installed}, {})
        self.assertGreater(sum(map(len, included.values())), 100)

    def test_no_header_needs_googletest(self):
        for header in self.installed_headers():
            text = (self.prefix / "include" / header).read_text()
            self.assertNotRegex(text, r"#\s*include\s*[<\"](gtest|gmock|tests)/", header)


if __name__ == "__main__":
    t.main()
