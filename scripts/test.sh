#!/usr/bin/env bash
# test.sh BUILD JOBS [ctest's flags]: runs all tests; CI and people see the same.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
build=${1:-build}
jobs=${2:-2}
shift $(($# < 2 ? $# : 2))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec ctest --test-dir "$build" -j "$jobs" --output-on-failure --no-tests=error "$@"
