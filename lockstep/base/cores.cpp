#include "lockstep/base/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

/// None where one is no number ("max", -1).
std::optional<double> ratio(const std::string& quota_text, const std::string& period_text) {
  const auto quota = parse_int(quota_text), period = parse_int(period_text);
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

/// "max 100000" or "150000 100000".
std::optional<double> quota_v2(const fs::path& folder) {
  const auto words = split(first_line(folder / "cpu.max"), ' ');
  return words.size() == 2 ? ratio(words[0], words[1]) : std::nullopt;
}

std::optional<double> quota_v1(const fs::path& folder) {
  return ratio(first_line(folder / "cpu.cfs_quota_us"), first_line(folder / "cpu.cfs_period_us"));
}

std::optional<double> least(std::optional<double> a, std::optional<double> b) {
  if (!a || !b) return a ? a : b;
  return std::min(*a, *b);
}

/// Of `group` below `root` and of all groups above it. In a container the path may be the host's,
/// which is not there: then the root is the container's own group.
template <class Read>
std::optional<double> least_upwards(const fs::path& root, const std::string& group, Read read) {
  std::optional<double> result = read(root);
  fs::path folder = root;
  for (const auto& part : fs::path(group).relative_path()) {
    folder /= part;
    result = least(result, read(folder));
  }
  return result;
}

}  // namespace

std::vector<int> allowed_processors() {
  cpu_set_t set;
  const bool known = ::sched_getaffinity(0, sizeof(set), &set) == 0;
  std::vector<int> processors;
  for (int i = 0; i < (known ? CPU_SETSIZE : online_processors()); ++i)
    if (!known || CPU_ISSET(i, &set)) processors.push_back(i);
  return processors;
}

void set_allowed_processors(const std::vector<int>& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors) {
    if (processor < 0 || processor >= CPU_SETSIZE)
      throw SystemError("cannot run on processor " + std::to_string(processor), EINVAL);
    CPU_SET(processor, &set);
  }
  if (::sched_setaffinity(0, sizeof(set), &set) == 0) return;
  std::vector<std::string> names;
  for (const int processor : processors) names.push_back(std::to_string(processor));
  throw SystemError("cannot run on processors " + join(names, ", "), errno);
}

int online_processors() {
  return static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

std::optional<double> processor_quota(const fs::path& proc_cgroup, const fs::path& cgroups) {
  std::ifstream in(proc_cgroup);
  std::optional<double> result;
  // "0::/user.slice", or, in version 1, "4:cpu,cpuacct:/user.slice".
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      result = least(result, least_upwards(cgroups, group, quota_v2));
      continue;
    }
    const auto names = split(controllers, ',');
    if (std::find(names.begin(), names.end(), "cpu") == names.end()) continue;
    for (const std::string& folder : {std::string("cpu"), controllers}) {
      result = least(result, least_upwards(cgroups / folder, group, quota_v1));
    }
  }
  return result;
}

std::vector<std::vector<int>> cores_of(const std::vector<int>& processors, const fs::path& system) {
  std::vector<std::vector<int>> cores;
  std::map<std::string, size_t> known;
  for (const int processor : processors) {
    const std::string name = "cpu" + std::to_string(processor);
    const auto siblings = first_line(system / name / "topology" / "thread_siblings_list");
    const auto at = known.try_emplace(siblings.empty() ? name : siblings, cores.size()).first;
    cores.resize(known.size());
    cores[at->second].push_back(processor);
  }
  return cores;
}

int usable_cores() {
  const auto cores = cores_of(allowed_processors());
  return usable_processors(static_cast<int>(cores.size()), processor_quota());
}

int usable_processors(int allowed, std::optional<double> quota) {
  const int by_quota = quota ? static_cast<int>(std::min<double>(*quota, allowed)) : allowed;
  return std::max(1, std::min(allowed, by_quota));
}

int usable_processors() {
  return usable_processors(static_cast<int>(allowed_processors().size()), processor_quota());
}

}  // namespace lockstep
