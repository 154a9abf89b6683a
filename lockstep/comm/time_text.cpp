// Of errors.h, what needs nothing of LibTorch.
#include <array>
#include <cstdio>

#include "lockstep/comm/errors.h"

namespace lockstep {

std::string seconds_text(std::chrono::milliseconds time) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", static_cast<double>(time.count()) / 1000.0);
  return std::string(text.data()) + " s";
}

}  // namespace lockstep
