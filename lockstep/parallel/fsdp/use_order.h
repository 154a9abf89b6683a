#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace lockstep::detail {

/// In which order units are used, learned in one round and foretold in the next. A round is a
/// forward and its backward. One that stops early, as an evaluation does, changes nothing.
class UseOrder {
 public:
  /// A new round begins.
  void begin() {
    finish();
    now_.clear();
    follows_ = true;
  }

  /// Notes that `unit` is used next. Gives the unit that was used after it in the round before;
  /// none when this round has gone another way, or that one ended here.
  std::optional<size_t> use(size_t unit) {
    const size_t at = now_.size();
    now_.push_back(unit);
    follows_ = follows_ && at < before_.size() && before_[at] == unit;
    if (!follows_ || at + 1 == before_.size()) return std::nullopt;
    return before_[at + 1];
  }

 private:
  void finish() {
    const bool is_start_of_before = follows_ && now_.size() <= before_.size();
    if (!is_start_of_before) before_ = now_;
  }

  std::vector<size_t> before_;
  std::vector<size_t> now_;
  bool follows_ = true;  ///< So far this round is the one before.
};

}  // namespace lockstep::detail
