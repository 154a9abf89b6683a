#!/usr/bin/env bash
# test.sh BUILD JOBS [ctest's flags]: runs all tests; CI and people see the same.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
build=${1:-build}
jobs=${2:-2}
shift $(($# < 2 ? $# : 2))
# For the presets asan and tsan: what is LibTorch's own is not ours to mend. ThreadSanitizer does not see how
# LibTorch lets go of its locks.
export LSAN_OPTIONS="suppressions=$root/tests/support/lsan_suppressions.txt:print_suppressions=0${LSAN_OPTIONS:+:$LSAN_OPTIONS}"
export UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
export TSAN_OPTIONS="suppressions=$root/tests/tsan/suppressions.txt:ignore_noninstrumented_modules=1:detect_deadlocks=0${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec ctest --test-dir "$build" -j "$jobs" --output-on-failure --no-tests=error "$@"
