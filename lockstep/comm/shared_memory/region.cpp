#include "lockstep/comm/shared_memory/region.h"

#include <algorithm>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/comm/shared_memory/fd_handover.h"

namespace lockstep::shm {
namespace {

/// What rank 0 hands out; gives up when `look` throws.
UniqueFd receive_from_host(const RegionOptions& options, const Meeting& meeting) {
  constexpr std::chrono::milliseconds kPause{1};
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  const auto look = [&] {
    if (options.look) options.look({0});
  };
  std::string name = meeting.ask();
  for (; name.empty(); name = meeting.ask()) {
    look();
    if (std::chrono::steady_clock::now() >= deadline)
      throw TimeoutError("shared memory of group '" + options.group +
                         "': rank 0 did not come to symmetric_empty");
    std::this_thread::sleep_for(kPause);
  }
  try {
    return receive(name, options.rank, options.timeout, options.group);
  } catch (const CommError&) {
    look();  // It may say more.
    throw;
  }
}

}  // namespace

Region::Region(const RegionOptions& options, const Meeting& meeting)
    : rank_(options.rank),
      bytes_(options.bytes),
      stride_(whole_pages(std::max<size_t>(1, bytes_))) {
  const size_t total = stride_ * static_cast<size_t>(options.size);
  if (rank_ != 0) {
    mapping_ = Mapping(receive_from_host(options, meeting).get(), total);
    return;
  }
  const UniqueFd memory = make_memory(total, total);
  mapping_ = Mapping(memory.get(), total);
  if (options.size == 1) return;
  hand_out(
      memory.get(), options.size, options.timeout, options.group, meeting.tell,
      [](int, const std::string&) {}, options.look);
}

void Regions::add(size_t number, const std::shared_ptr<const Region>& region) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [](const Entry& entry) { return entry.region.expired(); });
  entries_.push_back({number, region->mine(), region->bytes(), region});
}

std::optional<Place> Regions::find(const std::byte* data, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    // A region that is gone may have left its addresses to other memory.
    if (data < entry.begin || data + bytes > entry.begin + entry.bytes) continue;
    if (auto region = entry.region.lock())
      return Place{std::move(region), entry.number, static_cast<size_t>(data - entry.begin)};
  }
  return std::nullopt;
}

}  // namespace lockstep::shm
