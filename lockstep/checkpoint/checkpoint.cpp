#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep {
namespace {

using Texts = std::map<std::string, std::string>;

/// Of the keys that both have, or also of those that one has.
std::string differences_of(const Texts& found, const Texts& expected, bool of_both) {
  const auto value_of = [](const Texts& map, const std::string& key) {
    // A flag that did not exist yet is as one that was not given.
    const auto place = map.find(key);
    return "'" + (place == map.end() ? "none" : place->second) + "'";
  };
  Texts keys = found;
  keys.insert(expected.begin(), expected.end());
  std::string differences;
  for (const auto& [key, value] : keys) {
    if (of_both && !(found.contains(key) && expected.contains(key))) continue;
    const std::string before = value_of(found, key), now = value_of(expected, key);
    if (before == now) continue;
    differences += (differences.empty() ? "" : "; ") + key + " " + before + " in the checkpoint, " +
                   now + " in this run";
  }
  return differences;
}

}  // namespace

void check_identity(const std::filesystem::path& folder, const Texts& found,
                    const Texts& expected) {
  const std::string differences = differences_of(found, expected, /*of_both=*/false);
  if (differences.empty()) return;
  throw CheckpointError("checkpoint " + folder.string() + " does not fit this run: " + differences,
                        "run with the checkpoint's settings, or use another --checkpoint-dir");
}

std::string changed_settings(const Texts& found, const Texts& expected) {
  return differences_of(found, expected, /*of_both=*/true);
}

}  // namespace lockstep
