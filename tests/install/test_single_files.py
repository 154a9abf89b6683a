"""Each source compiles by itself, though a build compiles several as one.

In a unity build a source sees what those before it include. So each is also read alone, by the commands of the preset
`dev`. That takes long, so it is part of the long form.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import unittest

import lockstep_testing as t


class SingleFiles(unittest.TestCase):
    @unittest.skipUnless(os.environ.get("LOCKSTEP_LONG_TESTS"), "the long form only (LOCKSTEP_LONG_TESTS=1)")
    def test_each_source_compiles_by_itself(self):
        with t.temporary_folder() as folder:
            build = pathlib.Path(folder)
            t.run("cmake", "--preset", "dev", "-B", build, cwd=t.SOURCE_DIR, timeout=300)
            headers = re.findall(r"^build (\S*cmake_pch\.hxx\.gch)", (build / "build.ninja").read_text(), re.M)
            t.run("ninja", "-C", build, *headers, timeout=600)
            entries = [entry for entry in json.loads((build / "compile_commands.json").read_text())
                       if not entry["file"].startswith(str(build))]
            self.assertGreater(len(entries), 400)

            def errors(entry):
                words = shlex.split(entry["command"])
                at = words.index("-o")
                done = subprocess.run([*words[:at], *words[at + 2:], "-fsyntax-only"], cwd=entry["directory"],
                                      capture_output=True, text=True, check=False)
                return done.stderr if done.returncode else ""

            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                found = [text for text in pool.map(errors, entries) if text]
            self.assertEqual(found, [], "\n".join(found))


if __name__ == "__main__":
    t.main()
