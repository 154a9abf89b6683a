#!/usr/bin/env bash
# package.sh JOBS: builds a .deb and a tar.gz of the binary and the library into build/package.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
scripts/build.sh release "${1:-2}" lockstep_bin lockstep_bench lockstep_hosts lockstep_rpc_library
cpack --config build/CPackConfig.cmake -B build/package >build/package.log || { cat build/package.log >&2; exit 1; }
say "the packages are in build/package: apt install ./build/package/lockstep_*.deb"
