#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace lockstep::tool {

/// A Python interpreter and the torch that it would import.
struct PythonFound {
  std::filesystem::path path;
  std::string version;        ///< "3.11.7".
  std::string torch_version;  ///< "2.13.0+cpu"; empty when it has no torch.
  bool linked_torch = false;  ///< Its torch is the LibTorch that this program links.
};

/// The folder of the LibTorch that this process runs on (the one that holds lib/libtorch_cpu.so).
std::filesystem::path libtorch_folder();

/// Looks for Python: LOCKSTEP_PYTHON, else the interpreter of the virtual environment that the
/// linked LibTorch lies in, else python3 of PATH. None when there is none. Asks the interpreter
/// without importing torch (some 50 ms). Throws UsageError when LOCKSTEP_PYTHON names no program
/// that runs.
std::optional<PythonFound> find_python();

/// The same for a caller that cannot do without: throws Error saying how to get Python with torch.
PythonFound require_python_with_torch();

}  // namespace lockstep::tool
