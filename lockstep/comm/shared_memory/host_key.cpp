#include "lockstep/comm/shared_memory/host_key.h"

#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/env.h"
#include "lockstep/base/file.h"
#include "lockstep/base/file_size_limit.h"

namespace lockstep {

std::string host_id() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::string id = std::string(name) + "/" + boot;
  if (const auto declared = env_string("LOCKSTEP_HOST_ID")) id += "/" + *declared;
  return id;
}

std::string host_key() {
  // Of a group of some ten ranks.
  constexpr uint64_t kLeastMemory = 1 << 30;
  if (file_size_limit().value_or(kLeastMemory) < kLeastMemory) return {};
  if (!UniqueFd(memfd_create("lockstep", MFD_CLOEXEC))) return {};
  std::error_code ignored;
  const auto processes = std::filesystem::read_symlink("/proc/self/ns/pid", ignored).string();
  return host_id() + "/" + processes + "/" + std::to_string(geteuid());
}

}  // namespace lockstep
