#include "library.h"

#include <dlfcn.h>

#include <filesystem>
#include <set>
#include <string>

#include "entry.h"
#include "libtorch.h"
#include "lockstep/base/error.h"
#include "lockstep/launch/omp_waiting.h"

namespace lockstep::tool {
namespace {

constexpr const char* kCli = "liblockstep_cli.so";
constexpr const char* kHosts = "liblockstep_hosts.so";

/// A library beside the binary: in the build tree in ../lib, installed in the library folder.
/// Never unloaded: LibTorch's threads and registrations do not survive that.
void* load_library(const std::string& name, const std::string& if_missing) {
  launch::choose_omp_waiting();  // OpenMP, which comes with LibTorch, reads it when it is loaded.
  namespace fs = std::filesystem;
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
  throw Error(name + " is missing; looked for " + tried, if_missing);
}

void* symbol_in(const std::string& library, const std::string& if_missing, const char* name) {
  if (void* found = dlsym(load_library(library, if_missing), name)) return found;
  throw Error(library + " is of another version than this binary: it lacks " + name);
}

template <class Function>
Function* symbol(const char* name) {
  return reinterpret_cast<Function*>(library_symbol(name));
}

}  // namespace

void* library_symbol(const char* name) {
  return symbol_in(kCli, "the binary belongs into bin/ beside that folder", name);
}

void* bench_symbol(const char* name) {
  return symbol_in("liblockstep_bench.so", "`make build` builds it; `make train` does not need it",
                   name);
}

std::shared_ptr<void> serve_store(int listen_fd) {
  auto* host = symbol<void*(int, char*, size_t)>("lockstep_cli_host_store");
  auto* release = symbol<void(void*)>("lockstep_cli_release_store");
  char error[1024] = "";
  void* store = host(listen_fd, error, sizeof error);
  if (!store) throw CommError(std::string("cannot serve the store: ") + error);
  return {store, release};
}

std::shared_ptr<launch::HostAgent> join_job(const RunOptions& options) {
  const auto find = [](const char* name) {
    return symbol_in(kHosts, "`make build` builds it; `make train` does not need it", name);
  };
  auto* join =
      reinterpret_cast<void* (*)(const void*, int*, char*, size_t)>(find("lockstep_hosts_join"));
  auto* leave = reinterpret_cast<void (*)(void*)>(find("lockstep_hosts_leave"));
  char error[1024] = "";
  int exit_code = kExitFailure;
  void* joined = join(&options, &exit_code, error, sizeof error);
  if (!joined && exit_code == kExitUsage) throw UsageError(error);
  if (!joined) throw CommError(std::string("cannot meet the other hosts: ") + error);
  return {static_cast<launch::HostAgent*>(joined), leave};
}

}  // namespace lockstep::tool
