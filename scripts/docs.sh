#!/usr/bin/env bash
# docs.sh [FOLDER]: writes the site of the public headers and of docs/ with Doxygen, into build/docs or FOLDER. Fails
# where Doxygen warns.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
folder=${1:-build/docs}
command -v doxygen >/dev/null || fail "doxygen is missing" "run:  scripts/setup.sh --docs"
mkdir -p "$folder"
# docs/headers.md lists what is installed, which a test holds it to.
headers=$(sed -n 's/^| `\(lockstep\/[^`]*\)` | .*/\1/p' docs/headers.md)
version=$(sed -n 's/^ *VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt | head -n 1)
{
  cat docs/Doxyfile
  printf 'INPUT = %s\n' "README.md CONTRIBUTING.md docs examples/README.md ${headers//$'\n'/ }"
  printf 'PROJECT_NUMBER = %s\nOUTPUT_DIRECTORY = "%s"\n' "$version" "$folder"
} | doxygen -
say "the site begins at $folder/html/index.html"
