"""add_subdirectory of the source tree works too.

The library is not compiled a second time. Its files would be compiled by the commands of the build that is
tested, to the letter, so the objects of that build are taken. What a user adds is compiled, linked and run.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import sys
import unittest

import consumer_test
import lockstep_testing as t

LIBRARY = t.SOURCE_DIR / "lockstep"
# What decides how a file is compiled, and is the user's to choose.
CHOICES = ("CMAKE_BUILD_TYPE", "CMAKE_CXX_FLAGS", "CMAKE_CXX_FLAGS_RELEASE", "CMAKE_CXX_FLAGS_RELWITHDEBINFO",
           "CMAKE_CXX_COMPILER", "LOCKSTEP_MPI", "LOCKSTEP_UNITY")

FETCHED = """cmake_minimum_required(VERSION 3.25)
project(fetched LANGUAGES C CXX)
include(FetchContent)
FetchContent_Declare(Lockstep URL unused)
FetchContent_MakeAvailable(Lockstep)
add_executable(main main.cpp)
target_link_libraries(main PRIVATE Lockstep::lockstep)
"""


def choices_of_the_tested_build():
    cache = (t.BUILD_DIR / "CMakeCache.txt").read_text()
    return [f"-D{name}={value}" for name, value in re.findall(r"^(\w+):\w+=(.*)$", cache, re.M) if name in CHOICES]


class Compiled:
    """How a build compiles its files: each command, without the places where results go, and its result.

    What is compiled counts as well: a file of the library, or the list of files that are compiled as one.
    """

    def __init__(self, build, project_build):
        self.results, self.library, self.united = {}, {}, {}
        for entry in json.loads((build / "compile_commands.json").read_text()):
            # Only the binary needs what hosts agree by: a project that takes the library in has none of it.
            if re.search(r"_(test|tsan)\.dir/|/lockstep_elastic\.dir/", entry["command"]):
                continue
            command = re.sub(r" -o \S+", "", entry["command"]).replace(str(project_build), "BUILD")
            self.results[command] = str(build / re.search(r" -o (\S+)", entry["command"])[1])
            path = pathlib.Path(entry["file"])
            if LIBRARY in path.parents:
                self.library[str(path.relative_to(LIBRARY))] = command
            elif path.parent.name == "Unity" and project_build / "lockstep" in path.parents:
                name = str(path.relative_to(project_build / "lockstep"))
                self.library[name], self.united[name] = command, path.read_text()


class Subdirectory(unittest.TestCase):
    maxDiff = None

    def test_consumer_with_the_source_tree_inside(self):
        with consumer_test.temporary() as folder:
            build = pathlib.Path(folder) / "build"
            env = consumer_test.consumer_environment()
            launcher = [sys.executable, t.SOURCE_DIR / "scripts" / "reuse_objects.py", t.BUILD_DIR]
            t.run("cmake", "-S", consumer_test.HERE / "subdirectory", "-B", build, "-G", "Ninja",
                  "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DLOCKSTEP_SOURCE_DIR={t.SOURCE_DIR}",
                  f"-DCMAKE_CXX_COMPILER_LAUNCHER={';'.join(map(str, launcher))}",
                  *choices_of_the_tested_build(), timeout=120, env=env)
            ours, theirs = Compiled(t.BUILD_DIR, t.BUILD_DIR), Compiled(build, build / "lockstep")
            self.assertGreater(len(ours.library), 50)
            self.assertEqual(theirs.library, ours.library)
            self.assertEqual(theirs.united, ours.united)
            steps = t.run("ninja", "-C", build, "-n", env=env).stdout
            self.assertIn("liblockstep.a", steps)
            for unused in ("_test.cpp", "tools/lockstep", "examples/", "liblockstep_rpc.a"):
                self.assertNotIn(unused, steps)
            t.run("cmake", "--build", build, "-j", os.cpu_count() or 1, timeout=400, env=env)
            command = next(command for name, command in theirs.library.items() if name.startswith("comm/"))
            self.assertTrue(pathlib.Path(theirs.results[command]).is_symlink())
            self.check_that_rooms_run(build / "comm_consumer", f"file://{folder}/meet")
            self.assertEqual(t.run(build / "consumer", timeout=120).stdout, "consumer: 2 ranks, sum 3\n")

    def test_fetch_content_takes_the_library_only(self):
        """As a user writes it, without EXCLUDE_FROM_ALL."""
        with consumer_test.temporary() as folder:
            folder = pathlib.Path(folder)
            (folder / "CMakeLists.txt").write_text(FETCHED)
            (folder / "main.cpp").write_text("int main() {}\n")
            env = consumer_test.consumer_environment()
            t.run("cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                  f"-DFETCHCONTENT_SOURCE_DIR_LOCKSTEP={t.SOURCE_DIR}", timeout=120, env=env)
            steps = t.run("ninja", "-C", folder / "build", "-n", env=env).stdout
            results = set(re.findall(r"Linking \w+ (?:static library|shared library|executable) (\S+)", steps))
            self.assertEqual({pathlib.Path(result).name for result in results}, {"main", "liblockstep.a"})
            self.assertNotRegex(steps, r"_test\.|_deps/lockstep-build/(tools|examples|tests)/|lockstep_rpc\.dir")

    def check_that_rooms_run(self, program, method):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            ranks = list(pool.map(lambda rank: t.run(program, method, rank, 2, timeout=60).stdout, range(2)))
        self.assertEqual(ranks, ["comm_consumer: 2 ranks, sum 3\n"] * 2)


if __name__ == "__main__":
    t.main()
