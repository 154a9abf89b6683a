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
  std::erase_if(entries_, [](const Entry& entry) { return entry.region.expired(); });
  entries_.push_back({number, region->mine(), region->bytes(), region});
}

std::optional<RegionOffset> Regions::find(const std::byte* data, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    // A region that is gone may have left its addresses to other memory.
    if (data < entry.begin || data + bytes > entry.begin + entry.bytes) continue;
    if (auto region = entry.region.lock())
      return RegionOffset{std::move(region), entry.number, static_cast<size_t>(data - entry.begin)};
  }
  return std::nullopt;
}

}  // namespace lockstep::shm
