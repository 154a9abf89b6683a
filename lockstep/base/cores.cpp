#include "lockstep/base/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>
#include <string>

#include "lockstep/base/cgroup.h"
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
  std::optional<double> result;
  for (const auto& folder : cgroup_folders("cpu", proc_cgroup, cgroups))
    result = least(result, least(quota_v2(folder), quota_v1(folder)));
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
