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

# One line that moves on a terminal, else a line for every tenth of the work: what is done, and about how long the
# rest takes. What the compiler says is shown as it is. (awk would hold lines back.)
show_progress() {
  local line number tenth last=0 shown=
  while IFS= read -r line; do
    if [[ $line =~ ^@([0-9]+)\ ([0-9]+)\ ([0-9]+)[0-9.]*@ ]]; then
      number=("${BASH_REMATCH[@]:1}")
      local left=$((number[2] * (number[1] - number[0]) / (number[0] ? number[0] : 1)))
      line="[${number[0]} of ${number[1]}] about $(((left + 59) / 60)) min left"
      if [ -t 2 ]; then
        printf '\r\033[K%s' "$line" && shown=1
      elif tenth=$((10 * number[0] / number[1])) && [ "$tenth" -gt "$last" ]; then
        last=$tenth && printf '%s\n' "$line"
      fi
    elif [[ $line != ninja:\ Entering* ]]; then
      [ -z "$shown" ] || printf '\n'
      shown= && printf '%s\n' "$line"
    fi
  done >&2
  [ -z "$shown" ] || printf '\n' >&2
}

if ! ninja -C "$build" -n "${targets[@]}" 2>/dev/null | grep -q 'no work to do'; then
  say "Building ${targets[*]} with $jobs jobs (once; later builds compile what has changed)"
  NINJA_STATUS='@%f %t %e@ ' ninja -C "$build" -j "$jobs" "${targets[@]}" 2>&1 | show_progress
fi
