#!/usr/bin/env bash
# lint.sh: fails when clang-format would change a file or clang-tidy finds something.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
scripts/setup.sh --dev
cmake --preset dev >/dev/null # Its compile commands are those of single files.
git ls-files '*.h' '*.cpp' | grep -v '^cmake/gloo_stubs' | xargs clang-format --dry-run -Werror
exec python3 scripts/lint.py build-dev .venv-dev/bin/clang-tidy
