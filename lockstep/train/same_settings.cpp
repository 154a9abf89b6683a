#include "lockstep/train/same_settings.h"

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

/// "--seed is 0 on rank 0 and 7 on rank 2", or nothing.
std::string difference(const std::vector<Settings>& all, const std::string& name) {
  const std::string first = value_of(all.front(), name);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const std::string other = value_of(all[rank], name);
    if (other != first) {
      return name + " is " + first + " on rank 0 and " + other + " on rank " + std::to_string(rank);
    }
  }
  return {};
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
    std::string text = difference(all, name);
    if (!text.empty()) differences.push_back(std::move(text));
  }
  if (differences.empty()) return;
  throw MismatchError("the ranks have different settings: " + join(differences, ", "),
                      "start every rank with the same settings");
}

}  // namespace lockstep
