#include "library.h"

#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/launch/omp_waiting.h"

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

/// Loads LibTorch from where it is on this machine, before a library that needs it. The first of
/// these counts that has the version of the build:
/// - LOCKSTEP_TORCH, a folder with LibTorch's include/ and lib/. No other counts where it is set.
/// - the folder that the build used,
/// - beside this binary: a wheel's neighbour torch, libtorch/, lib/python3*/*-packages/torch,
/// - the active environment: VIRTUAL_ENV, CONDA_PREFIX.
/// Throws lockstep::Error, which says where it looked and what was there.
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

/// A library beside the binary: in the build tree in ../lib, installed in the library folder.
/// Never unloaded: LibTorch's threads and registrations do not survive that.
void* load_library(const std::string& name) {
  launch::choose_omp_waiting();  // OpenMP, which comes with LibTorch, reads it when it is loaded.
  const fs::path folder = fs::read_symlink("/proc/self/exe").parent_path();
  std::string tried;
  for (const std::string& libdir : std::set<std::string>{"lib", LOCKSTEP_LIBDIR}) {
    const auto path = (folder / ".." / libdir / name).lexically_normal();
    tried += (tried.empty() ? "" : ", ") + path.string();
    std::error_code ignored;
    if (!fs::exists(path, ignored)) continue;
    load_libtorch();
    // Lazily: binding every symbol of LibTorch at once takes 40 ms more.
    if (void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_GLOBAL)) return handle;
    throw Error("cannot load " + path.string() + ": " + dlerror(),
                "was LibTorch updated since the build? Build again");
  }
  throw Error(name + " is missing; looked for " + tried,
              name == "liblockstep_cli.so"
                  ? "the binary belongs into bin/ beside that folder"
                  : "`make build` builds it; `make train` does not need it");
}

}  // namespace

void* library_symbol(const std::string& library, const char* name) {
  if (void* found = dlsym(load_library(library), name)) return found;
  throw Error(library + " is of another version than this binary: it lacks " + name);
}

}  // namespace lockstep::tool
