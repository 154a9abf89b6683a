#!/usr/bin/env bash
# lint.sh BUILD: fails when clang-format would change a file or clang-tidy finds something.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
scripts/setup.sh --dev
build=${1:-build}
git ls-files '*.h' '*.cpp' | grep -v '^cmake/gloo_stubs' | xargs clang-format --dry-run -Werror
# GCC's precompiled headers and options mean nothing to clang: they are taken out of its copy of
# the compile commands.
tidy=$(mktemp -d)
trap 'rm -rf "$tidy"' EXIT
python3 - "$build/compile_commands.json" "$tidy/compile_commands.json" <<'PY'
import json, re, sys
commands = json.load(open(sys.argv[1]))
for entry in commands:
    entry["command"] = re.sub(r"-Winvalid-pch|-include \S*cmake_pch\.hxx", "", entry["command"])
json.dump(commands, open(sys.argv[2], "w"))
PY
git ls-files 'lockstep/*.cpp' 'tools/*.cpp' 'examples/*.cpp' |
  xargs -P "$(nproc)" -n 1 clang-tidy -p "$tidy" --quiet --warnings-as-errors='*'
