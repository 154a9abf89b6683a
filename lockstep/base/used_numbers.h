#pragma once

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <memory>

namespace lockstep {

/// The numbers that one sender has used, so that no message counts twice. Any order; those `Window`
/// behind the newest count as used. One thread at a time.
template <uint64_t Window>
class UsedNumbers {
 public:
  static constexpr uint64_t kWindow = Window;

  /// True for the first time.
  bool use(uint64_t number) {
    if (number > newest_) {
      const uint64_t skipped = std::min(number - newest_, kWindow);
      for (uint64_t i = 1; i <= skipped; ++i) used_->reset((newest_ + i) % kWindow);
      if (skipped == kWindow) used_->reset();
      newest_ = number;
    } else if (newest_ - number >= kWindow) {
      return false;
    }
    if (used_->test(number % kWindow)) return false;
    used_->set(number % kWindow);
    return true;
  }

 private:
  std::unique_ptr<std::bitset<kWindow>> used_ = std::make_unique<std::bitset<kWindow>>();
  uint64_t newest_ = 0;
};

}  // namespace lockstep
