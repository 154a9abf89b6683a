#!/usr/bin/env python3
"""lint.py BUILD CLANG_TIDY [FOLDER...]: clang-tidy over the C++ files in git, or over those in FOLDER.

LibTorch's headers cost ten seconds of each file's time. So files of one folder that are compiled alike
are read together, as one source that includes them; where two do not go together (the same name in
both), each is read alone.
"""

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FILES_READ_TOGETHER = 12
CHECKS = "-bugprone-suspicious-include"  # Beside .clang-tidy's: it minds how we read files together.
# A finding in an included file counts when its path matches.
OURS = r"/(lockstep|tools|examples|tests|python)/.*\.(h|inc|cpp)$"


def commands_of(build):
    """Each compiled file's command without its own name and what only GCC knows."""
    commands = {}
    for entry in json.loads((Path(build) / "compile_commands.json").read_text()):
        flags = re.sub(r"-Winvalid-pch|-include \S*cmake_pch\.hxx|-fpch-preprocess|-fvect-cost-model=\S+", "", entry["command"])
        flags = re.sub(r"\s-o \S+|\s-c \S+", "", flags)
        commands.setdefault(os.path.realpath(entry["file"]), (entry["directory"], " ".join(flags.split())))
    return commands


def groups_of(files, commands):
    """Lists of files of one folder with one command; tests apart, whose using-directives may differ."""
    alike = {}
    for file in files:
        if file in commands:  # Else this machine does not compile it (NCCL's).
            key = (os.path.dirname(file), file.endswith("_test.cpp"), commands[file])
            alike.setdefault(key, []).append(file)
    for group in alike.values():
        count = -(-len(group) // FILES_READ_TOGETHER)
        for part in range(count):
            yield group[part::count]


def tidy(clang_tidy, group, command):
    """clang-tidy over the group: its exit status and what it printed."""
    directory, flags = command
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "together.cpp" if len(group) > 1 else Path(group[0])
        if len(group) > 1:
            source.write_text("".join(f'#include "{file}"\n' for file in group))
        entry = {"directory": directory, "file": str(source), "command": f"{flags} -c {source}"}
        (Path(folder) / "compile_commands.json").write_text(json.dumps([entry]))
        done = subprocess.run(
            [clang_tidy, "-p", folder, "--quiet", f"--checks={CHECKS}", "--warnings-as-errors=*", f"--header-filter={OURS}",
             f"--config-file={Path.cwd() / '.clang-tidy'}", str(source)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout


def lint(clang_tidy, group, command):
    status, output = tidy(clang_tidy, group, command)
    if "clang-diagnostic-error" in output and len(group) > 1:
        parts = [lint(clang_tidy, [file], command) for file in group]
        return max(part[0] for part in parts), "".join(part[1] for part in parts)
    return status, output if status else ""


def main():
    build, clang_tidy, *folders = sys.argv[1:]
    listed = subprocess.run(["git", "ls-files", "*.cpp"], stdout=subprocess.PIPE, text=True, check=True)
    files = [os.path.realpath(file) for file in listed.stdout.split()
             if not folders or any(file.startswith(folder) for folder in folders)]
    commands = commands_of(build)
    groups = list(groups_of(files, commands))
    read, failed = 0, False
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for group, (status, output) in zip(
                groups, pool.map(lambda group: lint(clang_tidy, group, commands[group[0]]), groups)):
            read += len(group)
            failed = failed or status != 0
            print(f"[{read}/{sum(map(len, groups))}] {os.path.relpath(os.path.dirname(group[0]))}"
                  f"{' and what it includes' if not output else ''}", flush=True)
            print(output, end="", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
