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

std::shared_ptr<FastLink> make_link(Store& store, int rank, int size) {
  shm::SharedGroupOptions options;
  options.segment.rank = rank;
  options.segment.size = size;
  options.segment.slot_bytes = 64;  // Only the messages' memory is used.
  options.segment.message_bytes = FastLink::kRingBytes;
  options.segment.timeout = store.timeout();
  options.segment.group = "rpc";
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
  } catch (const Error& error) {
    lack = error.what();
    if (rank == 0) store.set(kMeeting, "none");  // Nobody need wait for it.
  }
  if (are_all(exchange(store, "made", rank, size, link ? "1" : "0"), "1")) return link;
  log_debug("rpc: calls go LibTorch's way only: no shared memory" +
            (lack.empty() ? " on another rank" : ": " + lack));
  return nullptr;
}

}  // namespace lockstep::rpc::detail
