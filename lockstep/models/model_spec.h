#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// "NAME" or "NAME:KEY=VALUE,KEY=VALUE", as `--model` takes it.
class ModelSpec {
 public:
  /// Throws UsageError for what is not of this form, and for a key that comes twice.
  explicit ModelSpec(const std::string& text);

  const std::string& name() const { return name_; }
  /// A whole number of at least 1; none where the key is absent.
  std::optional<int64_t> size(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;
  /// Throws UsageError for a key that is not one of these, with those that may be meant.
  void expect_keys(const std::vector<std::string>& known) const;

 private:
  std::string text_;
  std::string name_;
  std::map<std::string, std::string> values_;
};

}  // namespace lockstep
