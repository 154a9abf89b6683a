#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/shared_memory/memory.h"

namespace lockstep::shm {

/// Memory of which every rank of a group has a part of its own and sees the others'. What lies in
/// it can be reduced where it lies. Zeroed.
class Region {
 public:
  /// `bytes`: of each rank's part. Blocks until all have come. Throws what SharedMemory throws.
  Region(const MeetingOptions& options, size_t bytes, const Meeting& meeting);

  std::byte* part(int rank) const { return memory_.data() + static_cast<size_t>(rank) * stride_; }
  std::byte* mine() const { return part(rank_); }
  size_t bytes() const { return bytes_; }

 private:
  int rank_;
  size_t bytes_;
  size_t stride_;
  SharedMemory memory_;
};

/// An offset in a region, the same for all ranks: in bytes, into everyone's part.
struct RegionOffset {
  std::shared_ptr<const Region> region;
  size_t number = 0;  ///< Of the region, counted from 1 in the order in which they were made.
  size_t offset = 0;
};

/// The regions of a group that are still in use. Any thread may call.
class Regions {
 public:
  void add(size_t number, const std::shared_ptr<const Region>& region);
  /// Where these bytes of this rank lie, when all of them lie in its part of a region.
  std::optional<RegionOffset> find(const std::byte* data, size_t bytes) const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<size_t, std::weak_ptr<const Region>>> entries_;  ///< By number.
};

}  // namespace lockstep::shm
