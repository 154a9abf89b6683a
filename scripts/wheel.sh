#!/usr/bin/env bash
# wheel.sh [FOLDER]: builds the Python wheel (pyproject.toml) against the torch of an active virtual environment, else
# of .venv.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
folder=${1:-build/wheel}
python=${VIRTUAL_ENV:-.venv}/bin/python3
[ -x "$python" ] || fail "there is no $python, whose torch the wheel would be built against" \
  "activate a virtual environment with torch, or unset LOCKSTEP_TORCH and run scripts/setup.sh"
"$python" -c 'import scikit_build_core' 2>/dev/null ||
  fail "$python lacks scikit-build-core" "run: $python -m pip install scikit-build-core"
"$python" -m pip --disable-pip-version-check wheel -q --no-build-isolation --no-deps --wheel-dir "$folder" \
  --config-settings build-dir=build/wheel-objects .
say "the wheel is in $folder; install it by: $python -m pip install --no-deps $folder/lockstep-*.whl"
