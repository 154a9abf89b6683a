#include "lockstep/models/model_spec.h"

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"

namespace lockstep {

ModelSpec::ModelSpec(const std::string& text) : text_(text) {
  const size_t colon = text.find(':');
  name_ = text.substr(0, colon);
  if (colon == std::string::npos) return;
  for (const std::string& part : split(text.substr(colon + 1), ',')) {
    const size_t equals = part.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == part.size()) {
      throw UsageError("model '" + text + "': '" + part + "' is no KEY=VALUE",
                       "for example gpt:layers=2,heads=2,channels=64");
    }
    if (!values_.emplace(part.substr(0, equals), part.substr(equals + 1)).second) {
      throw UsageError("model '" + text + "': '" + part.substr(0, equals) + "' comes twice");
    }
  }
}

std::optional<int64_t> ModelSpec::size(const std::string& key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  const auto value = parse_int(found->second);
  if (value && *value >= 1) return value;
  throw UsageError("model '" + text_ + "': " + key + " is '" + found->second +
                   "'; expected a whole number of at least 1");
}

std::optional<double> ModelSpec::number(const std::string& key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  const auto value = parse_double(found->second);
  if (value) return value;
  throw UsageError("model '" + text_ + "': " + key + " is '" + found->second +
                   "'; expected a number");
}

void ModelSpec::expect_keys(const std::vector<std::string>& known) const {
  for (const auto& [key, value] : values_) {
    bool is_known = false;
    for (const std::string& word : known) is_known |= word == key;
    if (is_known) continue;
    if (known.empty()) {
      throw UsageError("model '" + text_ + "': " + name_ + " has no sizes to choose",
                       "write --model " + name_);
    }
    throw UsageError("model '" + text_ + "': " + unknown_word("size", key, known));
  }
}

}  // namespace lockstep
