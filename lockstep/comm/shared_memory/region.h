#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/shared_memory/memory.h"
#include "lockstep/comm/shared_memory/segment.h"

namespace lockstep::shm {

struct RegionOptions {
  int rank = 0;
  int size = 1;
  size_t bytes = 0;                            ///< Of each rank's part.
  std::chrono::milliseconds timeout{120'000};  ///< Until all have come.
  std::string group = "0";                     ///< For messages.
  /// Called again and again with the ranks that are waited for. May throw.
  std::function<void(const std::vector<int>& ranks)> look = {};
};

/// Memory of which every rank of a group has a part of its own and sees the others'. What lies in
/// it can be reduced where it lies. Zeroed.
class Region {
 public:
  /// Blocks until all have come. `meeting.ask` may return nothing for as long as rank 0 has not
  /// told. Throws what Segment and `look` throw.
  Region(const RegionOptions& options, const Meeting& meeting);

  std::byte* part(int rank) const { return mapping_.data() + static_cast<size_t>(rank) * stride_; }
  std::byte* mine() const { return part(rank_); }
  size_t bytes() const { return bytes_; }

 private:
  int rank_;
  size_t bytes_;
  size_t stride_;
  Mapping mapping_;
};

/// A place in a region, the same for all ranks: `offset` bytes into everyone's part.
struct Place {
  std::shared_ptr<const Region> region;
  size_t number = 0;  ///< Of the region, counted from 1 in the order in which they were made.
  size_t offset = 0;
};

/// The regions of a group that are still in use. Any thread may call.
class Regions {
 public:
  void add(size_t number, const std::shared_ptr<const Region>& region);
  /// Where these bytes of this rank lie, when all of them lie in its part of a region.
  std::optional<Place> find(const std::byte* data, size_t bytes) const;

 private:
  struct Entry {
    size_t number;
    const std::byte* begin;
    size_t bytes;
    std::weak_ptr<const Region> region;
  };
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace lockstep::shm
