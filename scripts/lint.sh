#!/usr/bin/env bash
# lint.sh BUILD: fails when clang-format would change a file or clang-tidy finds something.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
scripts/setup.sh --dev
build=${1:-build}
git ls-files '*.h' '*.cpp' | grep -v '^cmake/gloo_stubs' | xargs clang-format --dry-run -Werror
exec python3 scripts/lint.py "$build" .venv-dev/bin/clang-tidy
