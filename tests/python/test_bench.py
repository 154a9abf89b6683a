"""`lockstep bench python` measures what it says, with the package's Python and with none."""

import json
import sys
import unittest

import lockstep_testing as t
import torch_forks
import wheel_testing as w

w.require_tools()


def bench(python, *words, check=True):
    return t.run(t.LOCKSTEP, "bench", "python", "--steps", 3, "--rounds", 1, *words, check=check, timeout=280,
                 env=t.clean_environment(LOCKSTEP_PYTHON=python))


class BenchPython(unittest.TestCase):
    def test_rows(self):
        with t.temporary_folder() as folder:
            python = torch_forks.executable(folder, of=w.PYTHON)
            rows = json.loads(bench(python, "--json").stdout)["results"]
        self.assertEqual([row["work"] for row in rows],
                         ["DDP step of linear", "DDP step of mlp", "DDP step of wide", "all_reduce of 4 B",
                          "all_reduce of 437 KB", "lockstep run, torchrun: to the first all_reduce and out"])
        for row in rows:
            self.assertGreater(row["lockstep"], 0, row)
            self.assertAlmostEqual(row["ratio"], row["lockstep"] / row["gloo"])
            if "step of" in row["work"]:
                self.assertAlmostEqual(row["alone_ratio"], row["alone"] / row["gloo"])
            else:
                self.assertIsNone(row["alone"])

    def test_a_python_without_the_package_is_told_so(self):
        result = bench(sys.executable, check=False)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("has no package lockstep", result.stderr)
        self.assertIn("pip install .", result.stderr)


if __name__ == "__main__":
    t.main()
