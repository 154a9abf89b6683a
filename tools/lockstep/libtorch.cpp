#include "libtorch.h"

#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

const std::string kVersion = LOCKSTEP_LIBTORCH_VERSION;  ///< "2.13": ABI differs between them.

/// "2.13" of the LibTorch in a folder; empty where there is none.
std::string version_at(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder / "lib" / "libtorch.so", ignored)) return {};
  std::ifstream header(folder / "include/torch/headeronly/version.h");
  std::string word, major, minor;
  while (header >> word) {
    if (word == "TORCH_VERSION_MAJOR" && major.empty()) header >> major;
    if (word == "TORCH_VERSION_MINOR" && minor.empty()) header >> minor;
  }
  return major + "." + minor;
}

/// lib/python3*/*-packages/torch of a prefix.
void add_python_torch(const fs::path& prefix, std::vector<fs::path>& folders) {
  std::error_code ignored;
  for (const auto& python : fs::directory_iterator(prefix / "lib", ignored)) {
    if (!python.path().filename().string().starts_with("python3")) continue;
    for (const char* packages : {"site-packages", "dist-packages"})
      folders.push_back(python.path() / packages / "torch");
  }
}

std::vector<fs::path> candidates() {
  if (const auto told = env_string("LOCKSTEP_TORCH"))
    return {*told, fs::path(*told) / "torch", fs::path(*told) / "libtorch"};
  std::vector<fs::path> folders;
  if (*LOCKSTEP_LIBTORCH) folders.emplace_back(LOCKSTEP_LIBTORCH);
  const auto prefix = fs::read_symlink("/proc/self/exe").parent_path().parent_path();
  folders.push_back(prefix.parent_path() / "torch");
  folders.push_back(prefix / "libtorch");
  add_python_torch(prefix, folders);
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"})
    if (const auto environment = env_string(name)) add_python_torch(*environment, folders);
  return folders;
}

}  // namespace

void load_libtorch() {
  std::string looked;
  for (const auto& folder : candidates()) {
    const auto version = version_at(folder);
    if (version == kVersion) {
      const auto library = folder / "lib" / "libtorch.so";
      if (dlopen(library.c_str(), RTLD_LAZY | RTLD_GLOBAL)) return;
      throw Error("cannot load " + library.string() + ": " + dlerror());
    }
    looked += "\n  " + folder.string() + ": " + (version.empty() ? "none" : "version " + version);
  }
  throw Error(
      "found no LibTorch " + kVersion + ", with which this lockstep was built; looked in" + looked,
      "activate an environment with torch " + kVersion + " (pip install 'torch==" + kVersion +
          ".*'), or set LOCKSTEP_TORCH to the folder of a LibTorch");
}

}  // namespace lockstep::tool
