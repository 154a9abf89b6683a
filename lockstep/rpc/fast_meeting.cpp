#include "lockstep/rpc/fast_meeting.h"

#include <algorithm>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/host_place.h"

namespace lockstep::rpc::detail {
namespace {

constexpr const char* kMeeting = "fast/meeting";
/// Set, with the reason, by a rank that cannot have its part: nobody need wait for it.
constexpr const char* kFailed = "fast/failed";

std::shared_ptr<FastLink> make_link(Store& store, int rank, int size) {
  shm::SharedGroupOptions options;
  options.segment.rank = rank;
  options.segment.size = size;
  options.segment.slot_bytes = 64;  // Only the messages' memory is used.
  options.segment.message_bytes = FastLink::kRingBytes;
  options.segment.timeout = store.timeout();
  options.segment.group = "rpc";
  // Rank 0 would wait for those that have failed.
  options.segment.look = [&](const std::vector<int>&) {
    if (store.check({kFailed})) throw CommError(store.get(kFailed));
  };
  const shm::Meeting meeting{[&](const std::string& value) { store.set(kMeeting, value); },
                             [&] { return store.get(kMeeting); }};
  return std::make_shared<FastLink>(std::make_unique<shm::SharedGroup>(options, meeting));
}

/// What all ranks say, by rank.
std::vector<std::string> exchange(Store& store, const std::string& what, int rank, int size,
                                  const std::string& value) {
  const auto keys = numbered_keys("fast/" + what + "/", size);
  store.set(keys[static_cast<size_t>(rank)], value);
  return store.multi_get(keys);
}

bool are_all(const std::vector<std::string>& values, const std::string& wanted) {
  return std::all_of(values.begin(), values.end(),
                     [&](const std::string& value) { return value == wanted; });
}

}  // namespace

std::shared_ptr<FastLink> meet_over_memory(Store store, int rank, int size, bool wanted) {
  const std::string place = wanted ? shared_memory_place() : std::string();
  const auto places = exchange(store, "place", rank, size, place);
  if (place.empty() || !are_all(places, place)) {
    log_debug("rpc: calls go LibTorch's way only: not all ranks want shared memory or can have it");
    return nullptr;
  }
  std::shared_ptr<FastLink> link;
  std::string lack;
  try {
    link = make_link(store, rank, size);
  } catch (const std::exception& error) {
    lack = "rank " + std::to_string(rank) + ": " + error.what();
    store.set(kFailed, lack);
    if (rank == 0) store.set(kMeeting, "none");
  }
  const auto lacks = exchange(store, "made", rank, size, lack);
  if (are_all(lacks, "")) return link;
  const auto first =
      std::find_if(lacks.begin(), lacks.end(), [](const auto& l) { return !l.empty(); });
  log_debug("rpc: calls go LibTorch's way only: no shared memory: " + *first);
  return nullptr;
}

}  // namespace lockstep::rpc::detail
