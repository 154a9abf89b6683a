#include "lockstep/comm/shared_memory/region.h"

#include <algorithm>

namespace lockstep::shm {

Region::Region(const MeetingOptions& options, size_t bytes, const Meeting& meeting)
    : rank_(options.rank),
      bytes_(bytes),
      stride_(whole_pages(std::max<size_t>(1, bytes_))),
      memory_(options, meeting, stride_ * static_cast<size_t>(options.size),
              stride_ * static_cast<size_t>(options.size)) {
  memory_.meet();
}

void Regions::add(size_t number, const std::shared_ptr<const Region>& region) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
  entries_.emplace_back(number, region);
}

std::optional<RegionOffset> Regions::find(const std::byte* data, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [number, entry] : entries_) {
    // A region that is gone may have left its addresses to other memory.
    const auto region = entry.lock();
    if (region && data >= region->mine() && data + bytes <= region->mine() + region->bytes())
      return RegionOffset{region, number, static_cast<size_t>(data - region->mine())};
  }
  return std::nullopt;
}

}  // namespace lockstep::shm
