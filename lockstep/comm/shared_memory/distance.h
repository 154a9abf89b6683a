#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep::shm {

/// Whether the processors on which a group's ranks run share a cache: known from how long a line of
/// memory that another rank has just written takes to come. From another cache that is longer than
/// from memory. It may change at any time, where threads are not pinned or a hypervisor moves its
/// processors.
class Distance {
 public:
  /// One more look: how long it took, without the clock itself.
  void add(std::chrono::nanoseconds time) {
    // An interrupt in between is no distance.
    const double seen = std::min(kLongest, std::chrono::duration<double, std::nano>(time).count());
    mean_ns_ += (seen - mean_ns_) / kMemory;
  }
  bool far() const { return mean_ns_ > kFar; }

 private:
  // Measured on an EPYC: 30 to 50 ns within a cache, 130 to 160 between two. Memory itself answers
  // within some 100.
  static constexpr double kFar = 80, kLongest = 250;
  static constexpr double kMemory = 8;  ///< So many looks count.

  double mean_ns_ = 0;
};

}  // namespace lockstep::shm
