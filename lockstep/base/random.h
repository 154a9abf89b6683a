#pragma once

#include <cstdint>

namespace lockstep {

/// A random source whose stream is a function of its keys alone. The same (seed, a, b) gives the
/// same numbers on every machine, in every thread, in any order of use. It is SplitMix64 (Steele,
/// Lea, Flood: "Fast splittable pseudorandom number generators", 2014) from a state mixed of the
/// keys. Not for cryptography. Cheap to construct. Only one thread at a time may use it.
class KeyedRandom {
 public:
  explicit KeyedRandom(uint64_t seed, uint64_t a = 0, uint64_t b = 0);

  uint64_t next();
  /// Uniform in [0, bound); bound is at least 1. Unbiased (Lemire's method).
  uint64_t below(uint64_t bound);
  /// Uniform in [0, 1), 53 random bits.
  double uniform();
  /// Uniform in [low, high).
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  /// Standard normal (Box-Muller; both values of a pair are used).
  double normal();

 private:
  uint64_t state_;
  double spare_ = 0;
  bool has_spare_ = false;
};

}  // namespace lockstep
