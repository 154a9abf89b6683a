#include "env_python.h"

#include <ATen/Version.h>
#include <dlfcn.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "tools/lockstep/process.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

constexpr const char* kProbe = R"(
import importlib.metadata, importlib.util, json, os, sys
found = importlib.util.find_spec("torch")
print(json.dumps({
    "path": sys.executable,
    "version": ".".join(map(str, sys.version_info[:3])),
    "torch": importlib.metadata.version("torch") if found else "",
    "folder": os.path.realpath(os.path.dirname(found.origin)) if found and found.origin else "",
}))
)";

constexpr const char* kHowToGetPython =
    "run scripts/setup.sh, which makes a virtual environment with torch, or set LOCKSTEP_PYTHON to "
    "a python3 that can import torch";

/// None where it does not run.
std::optional<PythonFound> probe(const fs::path& python) {
  const auto result = run_process({python.string(), "-c", kProbe}, {}, std::chrono::seconds(30));
  if (result.status != 0) return std::nullopt;
  const auto answer = nlohmann::json::parse(result.out, nullptr, false);
  if (!answer.is_object()) return std::nullopt;
  PythonFound found{python, answer.value("version", ""), answer.value("torch", "")};
  if (!python.has_parent_path()) found.path = answer.value("path", "");  // It was found in PATH.
  std::error_code ignored;
  found.linked_torch = answer.value("folder", "") == fs::canonical(libtorch_folder(), ignored);
  return found;
}

}  // namespace

fs::path libtorch_folder() {
  Dl_info info{};
  if (!::dladdr(reinterpret_cast<void*>(&at::get_cpu_capability), &info) || !info.dli_fname) {
    throw Error("cannot tell from which file LibTorch was loaded");
  }
  return fs::absolute(info.dli_fname).parent_path().parent_path();
}

std::optional<PythonFound> find_python() {
  if (const auto chosen = env_string("LOCKSTEP_PYTHON")) {
    if (auto found = probe(*chosen)) return found;
    throw UsageError("LOCKSTEP_PYTHON='" + *chosen + "' is no Python 3 interpreter that runs",
                     "set it to the path of a python3, or unset it");
  }
  // .../venv/lib/python3.x/site-packages/torch
  const fs::path prefix = libtorch_folder().parent_path().parent_path().parent_path().parent_path();
  if (auto found = probe(prefix / "bin" / "python3")) return found;
  return probe("python3");
}

PythonFound require_python_with_torch() {
  auto found = find_python();
  if (!found) throw Error("no Python interpreter found", kHowToGetPython);
  if (found->torch_version.empty()) {
    throw Error("the Python found, " + found->path.string() + ", has no torch", kHowToGetPython);
  }
  return *found;
}

}  // namespace lockstep::tool
