#!/usr/bin/env bash
# bench.sh BUILD [flags of `lockstep bench targets`]: measures what the project promises about its
# speed, against Python in the same run, prints the table and writes BUILD/bench.json and bench.html.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
build=${1:-build}
shift $(($# < 1 ? $# : 1))
lockstep=$build/bin/lockstep
[ -x "$lockstep" ] || fail "$lockstep is not built" "run: make build"

# Real MNIST where it is at hand; else the built-in digits stand in for it.
if [ -z "${LOCKSTEP_DATA_DIR:-}" ] && [ -d "$root/../shared/data/mnist" ]; then
  export LOCKSTEP_DATA_DIR=$root/../shared/data
fi
# The tests leave a virtual environment with the Python package.
if [ -z "${LOCKSTEP_PYTHON:-}" ] && [ -x "$build/python/venv/bin/python" ]; then
  export LOCKSTEP_PYTHON=$root/$build/python/venv/bin/python
fi
"$lockstep" bench targets --output "$build/bench.json" "$@"
"$lockstep" report "$build/bench.json" --output "$build/bench.html" >/dev/null
say "written to $build/bench.json and $build/bench.html"
