#include "lockstep/base/cgroup.h"

#include <algorithm>
#include <fstream>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

/// The first of the files that holds a number.
std::optional<int64_t> number_in(const fs::path& folder, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (const auto number = parse_int(first_line(folder / name))) return number;
  return std::nullopt;
}

int64_t kills_in(const fs::path& folder) {
  int64_t kills = 0;
  for (const char* name : {"memory.events", "memory.oom_control"}) {
    std::ifstream in(folder / name);
    for (std::string line; std::getline(in, line);)
      if (line.starts_with("oom_kill ")) kills += parse_int(line.substr(9)).value_or(0);
  }
  return kills;
}

}  // namespace

std::vector<fs::path> cgroup_folders(const std::string& controller, const fs::path& proc_cgroup,
                                     const fs::path& cgroups) {
  std::vector<fs::path> folders;
  std::ifstream in(proc_cgroup);
  // "0::/user.slice", or, in version 1, "4:cpu,cpuacct:/user.slice".
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const auto names = split(controllers, ',');
    std::vector<fs::path> roots;
    if (controllers.empty()) roots = {cgroups};
    if (std::find(names.begin(), names.end(), controller) != names.end())
      roots = {cgroups / controller};
    if (names.size() > 1 && !roots.empty()) roots.push_back(cgroups / controllers);
    for (fs::path folder : roots) {
      folders.push_back(folder);
      for (const auto& part : fs::path(line.substr(second + 1)).relative_path())
        folders.push_back(folder /= part);
    }
  }
  return folders;
}

MemoryUse memory_use(const std::vector<fs::path>& folders) {
  constexpr int64_t kNoLimit = int64_t{1} << 60;  // Version 1 has a number for it.
  MemoryUse use;
  for (const auto& folder : folders) {
    use.kills += kills_in(folder);
    const auto limit = number_in(folder, {"memory.max", "memory.limit_in_bytes"});
    if (!limit || *limit >= use.limit.value_or(kNoLimit)) continue;
    use.limit = limit;
    use.peak = number_in(folder, {"memory.peak", "memory.max_usage_in_bytes"});
  }
  return use;
}

}  // namespace lockstep
