#include "lockstep/checkpoint/checkpoint.h"

#include <set>

namespace lockstep {
namespace {

std::string differences_of(const std::set<std::string>& keys,
                           const std::map<std::string, std::string>& found,
                           const std::map<std::string, std::string>& expected) {
  const auto value_of = [](const std::map<std::string, std::string>& map, const std::string& key) {
    // A flag that did not exist yet is as one that was not given.
    const auto place = map.find(key);
    return "'" + (place == map.end() ? "none" : place->second) + "'";
  };
  std::string differences;
  for (const std::string& key : keys) {
    const std::string before = value_of(found, key);
    const std::string now = value_of(expected, key);
    if (before == now) continue;
    differences += (differences.empty() ? "" : "; ") + key + " " + before + " in the checkpoint, " +
                   now + " in this run";
  }
  return differences;
}

}  // namespace

void check_identity(const std::filesystem::path& folder,
                    const std::map<std::string, std::string>& found,
                    const std::map<std::string, std::string>& expected) {
  std::set<std::string> keys;
  for (const auto& [key, value] : found) keys.insert(key);
  for (const auto& [key, value] : expected) keys.insert(key);
  const std::string differences = differences_of(keys, found, expected);
  if (differences.empty()) return;
  throw CheckpointError("checkpoint " + folder.string() + " does not fit this run: " + differences,
                        "run with the checkpoint's settings, or use another --checkpoint-dir");
}

std::string changed_settings(const std::map<std::string, std::string>& found,
                             const std::map<std::string, std::string>& expected) {
  std::set<std::string> keys;
  for (const auto& [key, value] : found) {
    if (expected.contains(key)) keys.insert(key);
  }
  return differences_of(keys, found, expected);
}

}  // namespace lockstep
