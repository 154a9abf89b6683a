#!/usr/bin/env bash
# lint.sh BUILD: fails when clang-format would change a file or clang-tidy finds something.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
scripts/setup.sh --dev
build=${1:-build}
git ls-files '*.h' '*.cpp' | grep -v '^cmake/gloo_stubs' | xargs clang-format --dry-run -Werror
# GCC's precompiled headers and options mean nothing to clang: they are taken out of its copy of
# the compile commands. A file that this machine does not compile (NCCL's) is left out, and one that
# several targets compile is read once.
tidy=$(mktemp -d)
trap 'rm -rf "$tidy"' EXIT
git ls-files '*.cpp' | python3 -c '
import json, os, re, sys
commands = {}
for entry in json.load(open(sys.argv[1])):
    entry["command"] = re.sub(r"-Winvalid-pch|-include \S*cmake_pch\.hxx", "", entry["command"])
    commands.setdefault(entry["file"], entry)
json.dump(list(commands.values()), open(sys.argv[2], "w"))
for file in sys.stdin.read().split():
    if os.path.abspath(file) in commands:
        print(file)
' "$build/compile_commands.json" "$tidy/compile_commands.json" |
  xargs -P "$(nproc)" -n 1 .venv-dev/bin/clang-tidy -p "$tidy" --quiet --warnings-as-errors='*'
