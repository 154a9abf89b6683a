#!/usr/bin/env bash
# versions.sh [VERSION...]: builds the library and a core of the tests against each of these versions of torch from
# PyPI, and runs that core on the CPU. Prints the lines of docs/install.md's table. Takes some 15 minutes of two cores
# and 3 GB each, in build-versions/.
#
# PyPI's torch is a CUDA build. What its CPU part needs of CUDA is fetched, the rest of CUDA is left out: 2 GB less.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$root"
[ $# -gt 0 ] || set -- 2.11.0 2.12.0 2.13.0 2.14.0
tests=(comm_store comm_shm autograd optim data_parallel)
python=${VIRTUAL_ENV:-.venv}/bin/python3

# fetch VERSION FOLDER: the folder's torch/ is then a LibTorch for the CPU.
fetch() {
  [ ! -e "$2/torch/.complete" ] || return 0
  rm -rf "$2/torch" "$2/nvidia"
  "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$2" "torch==$1"
  local lib=$2/torch/lib cuda
  cuda=$(readelf -d "$lib/libtorch_cpu.so" | sed -n 's/.*\[libcudart\.so\.\([0-9]*\)\].*/\1/p')
  if [ -n "$cuda" ]; then
    local suffix=
    [ "$cuda" -gt 12 ] || suffix=-cu$cuda
    "$python" -m pip install -q --disable-pip-version-check --no-deps --upgrade --target "$2" \
      "nvidia-cuda-runtime$suffix==$cuda.*" "nvidia-cuda-cupti$suffix==$cuda.*"
    rm -f "$lib"/lib{torch,c10}_cuda*.so "$lib/libtorch_nvshmem.so" "$lib/libtorch_python.so"
    gcc -shared -o "$lib/libtorch.so" -Wl,-soname,libtorch.so,--no-as-needed,-rpath,'$ORIGIN' "$lib/libtorch_cpu.so"
  fi
  touch "$2/torch/.complete"
}

# check VERSION FOLDER: builds the library and the core, and runs it.
check() {
  fetch "$1" "$2" || return 1
  cmake -S . -B "$2/build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-O0 -DNDEBUG" \
    -DLOCKSTEP_TORCH="$root/$2/torch" || return 1
  local targets=(lockstep_bin lockstep_rpc_library example_quickstart_distributed) test
  for test in "${tests[@]}"; do targets+=("lockstep_${test}_test"); done
  ninja -k 0 -C "$2/build" -j "${JOBS:-2}" "${targets[@]}" || return 1
  for test in "${tests[@]}"; do "$2/build/tests/lockstep_${test}_test" --gtest_brief=1 || return 1; done
  "$2/build/examples/quickstart/distributed" || return 1
  "$2/build/bin/lockstep" train --model mlp --dataset digits --devices 2 --max-epochs 1
}

export OMP_NUM_THREADS=1
status=0
for version in "$@"; do
  folder=build-versions/$version
  mkdir -p "$folder"
  if check "$version" "$folder" >"$folder/log" 2>&1; then
    say "| $version | builds, ${#tests[@]} test programs and quickstart/distributed and lockstep train pass |"
  else
    status=1
    say "| $version | FAILS: see $folder/log |"
  fi
done
exit $status
