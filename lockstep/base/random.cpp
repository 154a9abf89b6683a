#include "lockstep/base/random.h"

#include <cmath>
#include <numbers>

namespace lockstep {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace

KeyedRandom::KeyedRandom(uint64_t seed, uint64_t a, uint64_t b)
    : state_(mix(mix(mix(seed + kGolden) + a + kGolden) + b + kGolden)) {}

uint64_t KeyedRandom::next() {
  return mix(state_ += kGolden);
}

uint64_t KeyedRandom::below(uint64_t bound) {
  const uint64_t threshold = -bound % bound;
  while (true) {
    const auto product = static_cast<unsigned __int128>(next()) * bound;
    if (static_cast<uint64_t>(product) >= threshold) return static_cast<uint64_t>(product >> 64);
  }
}

double KeyedRandom::uniform() {
  return static_cast<double>(next() >> 11) * 0x1.0p-53;
}

double KeyedRandom::normal() {
  if (has_spare_) {
    has_spare_ = false;
    return spare_;
  }
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  const double angle = 2 * std::numbers::pi * uniform();
  spare_ = radius * std::sin(angle);
  has_spare_ = true;
  return radius * std::cos(angle);
}

}  // namespace lockstep
