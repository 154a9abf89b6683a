#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

/// How far a wait for keys of a store has come. What is there is not asked for again. So the keys
/// sent grow with the number of keys and of questions, not with their product.
class Arrival {
 public:
  explicit Arrival(std::vector<std::string> keys) : keys_(std::move(keys)) {}

  /// True once each key has been seen. `check`: whether all keys of a list are there.
  template <class Check>
  bool complete(Check check) {
    for (size_t count = 1; seen_ < keys_.size();) {
      const auto from = keys_.begin() + static_cast<std::ptrdiff_t>(seen_);
      count = std::min(count, keys_.size() - seen_);
      if (check(std::vector<std::string>(from, from + static_cast<std::ptrdiff_t>(count)))) {
        seen_ += count;
        count *= 2;
      } else if (count > 1) {
        count = 1;
      } else {
        return false;
      }
    }
    return true;
  }

  const std::vector<std::string>& keys() const { return keys_; }
  /// How many keys, of the first ones, have been seen.
  size_t seen() const { return seen_; }

 private:
  std::vector<std::string> keys_;
  size_t seen_ = 0;
};

}  // namespace lockstep
