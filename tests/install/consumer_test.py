"""Builds and runs the consumer of a folder beside this file."""

import os
import pathlib
import tempfile

import lockstep_testing as t

HERE = pathlib.Path(__file__).parent


def consumer_environment():
    """The test's own environment decides which LibTorch is found: the one that we link."""
    return t.clean_environment(LOCKSTEP_TORCH=t.LIBTORCH)


def build_and_run(test, project, folder, *defines, timeout):
    build = pathlib.Path(folder) / "build"
    env = consumer_environment()
    t.run("cmake", "-S", HERE / project, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *defines,
          timeout=120, env=env)
    t.run("cmake", "--build", build, "-j", os.cpu_count() or 1, timeout=timeout, env=env)
    found = [p for p in build.rglob("consumer") if p.is_file()]
    test.assertEqual(len(found), 1)
    out = t.run(found[0], timeout=60).stdout
    test.assertIn("consumer: 2 ranks, sum 3", out)


def temporary():
    return tempfile.TemporaryDirectory(prefix="lockstep-install.")
