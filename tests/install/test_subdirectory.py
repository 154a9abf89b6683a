"""add_subdirectory of the source tree works too.

The whole library is not compiled a second time. Its files would be compiled by the commands of the
build that is tested, to the letter; the two lowest rooms are built, and run inside a consumer.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import unittest

import consumer_test
import lockstep_testing as t

LIBRARY = t.SOURCE_DIR / "lockstep"
# What decides how a file is compiled, and is the user's to choose.
CHOICES = ("CMAKE_BUILD_TYPE", "CMAKE_CXX_FLAGS", "CMAKE_CXX_FLAGS_RELEASE", "CMAKE_CXX_COMPILER", "LOCKSTEP_MPI",
           "LOCKSTEP_HWLOC")


def choices_of_the_tested_build():
    cache = (t.BUILD_DIR / "CMakeCache.txt").read_text()
    return [f"-D{name}={value}" for name, value in re.findall(r"^(\w+):\w+=(.*)$", cache, re.M) if name in CHOICES]


def commands(build, project_build):
    """How each file of the library is compiled for it, without the places where the results go."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"])
        if LIBRARY in path.parents and not re.search(r"_(test|tsan)\.dir/", entry["command"]):
            command = re.sub(r" -o \S+", "", entry["command"])
            found[str(path.relative_to(LIBRARY))] = command.replace(str(project_build), "BUILD")
    return found


class Subdirectory(unittest.TestCase):
    maxDiff = None

    def test_consumer_with_the_source_tree_inside(self):
        with consumer_test.temporary() as folder:
            build = pathlib.Path(folder) / "build"
            env = consumer_test.consumer_environment()
            t.run("cmake", "-S", consumer_test.HERE / "subdirectory", "-B", build, "-G", "Ninja",
                  "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DLOCKSTEP_SOURCE_DIR={t.SOURCE_DIR}",
                  *choices_of_the_tested_build(), timeout=120, env=env)
            ours = commands(t.BUILD_DIR, t.BUILD_DIR)
            self.assertGreater(len(ours), 50)
            self.assertEqual(commands(build, build / "lockstep"), ours)
            steps = t.run("ninja", "-C", build, "-n", "consumer", env=env).stdout
            self.assertIn("liblockstep.a", steps)
            for tests_or_tools in ("_test.cpp", "tools/lockstep", "examples/"):
                self.assertNotIn(tests_or_tools, steps)
            t.run("cmake", "--build", build, "-j", os.cpu_count() or 1, timeout=1200, env=env)
            self.check_that_it_runs(build / "comm_consumer", f"file://{folder}/meet")

    def check_that_it_runs(self, program, method):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            ranks = list(pool.map(lambda rank: t.run(program, method, rank, 2, timeout=60).stdout, range(2)))
        self.assertEqual(ranks, ["comm_consumer: 2 ranks, sum 3\n"] * 2)


if __name__ == "__main__":
    t.main()
