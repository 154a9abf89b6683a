#!/usr/bin/env bash
# build.sh PRESET JOBS [TARGET...]: configures when needed and builds the targets, or everything.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
preset=${1:-release}
jobs=${2:-2}
shift $(($# < 2 ? $# : 2))
targets=("${@:-all}")
build=build
[ "$preset" = release ] || build=build-$preset

# A file that includes LibTorch takes up to 2 GB to compile.
memory_jobs=$(awk '/MemAvailable/{n = int($2 / 2000000); print n < 1 ? 1 : n}' /proc/meminfo)
[ "$jobs" -le "$memory_jobs" ] || jobs=$memory_jobs

# CMake looks at the environment only when it configures: configure again when it would
# find another LibTorch than the one that the build folder has.
torch=$(find_libtorch)
stamp=$build/.libtorch
if [ ! -e "$build/build.ninja" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$torch" ]; then
  cmake --preset "$preset" >"$build.configure.log" 2>&1 ||
    { cat "$build.configure.log" >&2; fail "configuring failed; the log stands above"; }
  mv "$build.configure.log" "$build/configure.log"
  printf '%s' "$torch" >"$stamp"
  grep '^-- LibTorch' "$build/configure.log" >&2 || true
fi
ninja -C "$build" -n "${targets[@]}" 2>/dev/null | grep -q 'no work to do' ||
  cmake --build "$build" -j "$jobs" --target "${targets[@]}"
