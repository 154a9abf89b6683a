#include "lockstep/train/same_settings.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

std::string value_of(const Settings& settings, const std::string& name) {
  const auto found = settings.find(name);
  if (found == settings.end()) return "not set";
  return found->second.empty() ? "empty" : found->second;
}

}  // namespace

void check_same_settings(const Settings& mine, const ProcessGroup& group) {
  if (group.size() == 1) return;
  std::vector<Settings> all;
  std::set<std::string> names;
  for (const nlohmann::json& settings : group.all_gather_object(mine)) {
    all.push_back(settings.get<Settings>());
    for (const auto& [name, value] : all.back()) names.insert(name);
  }
  std::vector<std::string> differences;
  for (const std::string& name : names) {
    const std::string first = value_of(all.front(), name);
    const auto other = std::find_if(all.begin(), all.end(), [&](const Settings& settings) {
      return value_of(settings, name) != first;
    });
    if (other == all.end()) continue;
    differences.push_back(name + " is " + first + " on rank 0 and " + value_of(*other, name) +
                          " on rank " + std::to_string(other - all.begin()));
  }
  if (differences.empty()) return;
  throw MismatchError("the ranks have different settings: " + join(differences, ", "),
                      "start every rank with the same settings");
}

}  // namespace lockstep
