# Finds a LibTorch of 2.11 or later and makes the target LibTorch::torch.
#
# LibTorch's own TorchConfig.cmake refuses a CUDA build where no CUDA toolkit is
# installed, and PyPI's default Linux wheel is such a build. This module links the
# libraries directly and so needs no toolkit.
#
# For the wheel it is that of LOCKSTEP_PYTHON_TORCH (see LockstepPythonTorch). Else searched in this
# order, the first that exists wins:
#   CMAKE_PREFIX_PATH (a LibTorch folder or its share/cmake), LOCKSTEP_TORCH
#   (variable or environment), the active virtual environment, ./.venv.
#
# Sets LibTorch_FOUND, LibTorch_ROOT, LibTorch_VERSION, LibTorch_HAS_CUDA (the
# LibTorch is a CUDA build), LibTorch_CUDA_HEADERS (the toolkit's headers were
# found, so CUDA features compile), LibTorch_HAS_GLOO_HEADERS.

set(_lockstep_torch_candidates ${LOCKSTEP_PYTHON_TORCH})
foreach(_prefix IN LISTS CMAKE_PREFIX_PATH)
  foreach(_suffix "" "/../.." "/../../.." "/torch" "/libtorch")
    list(APPEND _lockstep_torch_candidates "${_prefix}${_suffix}")
  endforeach()
endforeach()
foreach(_prefix "${LOCKSTEP_TORCH}" "$ENV{LOCKSTEP_TORCH}")
  if(_prefix)
    list(APPEND _lockstep_torch_candidates "${_prefix}" "${_prefix}/torch" "${_prefix}/libtorch")
  endif()
endforeach()
foreach(_venv "$ENV{VIRTUAL_ENV}" "${PROJECT_SOURCE_DIR}/.venv")
  if(_venv)
    file(GLOB _found LIST_DIRECTORIES true "${_venv}/lib*/python3*/site-packages/torch")
    list(APPEND _lockstep_torch_candidates ${_found})
  endif()
endforeach()

set(LibTorch_ROOT "")
set(_lockstep_torch_rejected "")
foreach(_candidate IN LISTS _lockstep_torch_candidates)
  get_filename_component(_candidate "${_candidate}" ABSOLUTE)
  if(NOT EXISTS "${_candidate}/lib/libtorch_cpu.so")
    continue()
  endif()
  set(_version_header "${_candidate}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${_version_header}")
    set(_version_header "${_candidate}/include/torch/csrc/api/include/torch/version.h")
  endif()
  set(_version "0.0.0")
  if(EXISTS "${_version_header}")
    file(STRINGS "${_version_header}" _lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3" _version
                         "${_lines}")
  endif()
  if(_version VERSION_LESS 2.11)
    list(APPEND _lockstep_torch_rejected "${_candidate} (version ${_version}, 2.11 is needed)")
    continue()
  endif()
  set(LibTorch_ROOT "${_candidate}")
  set(LibTorch_VERSION "${_version}")
  break()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch
  REQUIRED_VARS LibTorch_ROOT
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE
    "no LibTorch of 2.11 or later. Searched CMAKE_PREFIX_PATH, LOCKSTEP_TORCH, VIRTUAL_ENV and ${PROJECT_SOURCE_DIR}/.venv. Rejected: '${_lockstep_torch_rejected}'. Run scripts/setup.sh, or set LOCKSTEP_TORCH to the folder that holds include/ and lib/ of LibTorch."
)

if(LibTorch_FOUND AND NOT TARGET LibTorch::torch)
  set(LibTorch_HAS_CUDA OFF)
  set(LibTorch_CUDA_HEADERS OFF)
  set(LibTorch_HAS_GLOO_HEADERS OFF)
  set(_lib "${LibTorch_ROOT}/lib")
  set(_include "${LibTorch_ROOT}/include" "${LibTorch_ROOT}/include/torch/csrc/api/include")
  # The linker would drop libtorch_cpu's static registrations without --no-as-needed.
  set(_link "-Wl,--push-state,--no-as-needed" "${_lib}/libtorch_cpu.so" "${_lib}/libc10.so")
  if(EXISTS "${_lib}/libtorch_cuda.so")
    set(LibTorch_HAS_CUDA ON)
    list(APPEND _link "${_lib}/libtorch_cuda.so" "${_lib}/libc10_cuda.so")
    find_path(
      LibTorch_CUDA_INCLUDE cuda_runtime_api.h
      HINTS "$ENV{CUDA_HOME}/include" /usr/local/cuda/include
            "${LibTorch_ROOT}/../nvidia/cuda_runtime/include" "${LibTorch_ROOT}/../nvidia/cu13/include")
    if(LibTorch_CUDA_INCLUDE)
      set(LibTorch_CUDA_HEADERS ON)
    endif()
  endif()
  list(APPEND _link "${_lib}/libtorch.so" "-Wl,--pop-state")
  add_library(LibTorch::torch INTERFACE IMPORTED)
  set_target_properties(
    LibTorch::torch
    PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_include}"
               INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"
               INTERFACE_COMPILE_FEATURES cxx_std_20)
  target_link_libraries(LibTorch::torch INTERFACE ${_link})
  # A CUDA build's libraries need others that sit beside them or in the nvidia wheels;
  # the dynamic loader finds those by their own run paths, the linker need not.
  target_link_options(LibTorch::torch INTERFACE "-Wl,--allow-shlib-undefined")
  if(NOT LOCKSTEP_BUILD_WHEEL) # which has run paths of its own
    target_link_options(LibTorch::torch INTERFACE "-Wl,-rpath,${_lib}")
  endif()
  if(LibTorch_CUDA_HEADERS)
    set_property(
      TARGET LibTorch::torch
      APPEND
      PROPERTY INTERFACE_INCLUDE_DIRECTORIES "${LibTorch_CUDA_INCLUDE}")
  endif()
  if(EXISTS "${LibTorch_ROOT}/include/gloo/context.h")
    set(LibTorch_HAS_GLOO_HEADERS ON)
  endif()
endif()
