#include "lockstep/rpc/fast_meeting.h"

#include <algorithm>
#include <functional>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/host_place.h"
#include "lockstep/rpc/ring_link.h"
#include "lockstep/rpc/socket_meeting.h"

namespace lockstep::rpc::detail {
namespace {

constexpr const char* kNone = "none";

/// What all ranks say, by rank.
std::vector<std::string> exchange(Store& store, const std::string& what, const FastMeeting& meeting,
                                  const std::string& value) {
  const auto keys = numbered_keys("fast/" + what + "/", meeting.size);
  store.set(keys[static_cast<size_t>(meeting.rank)], value);
  return store.multi_get(keys);
}

bool are_all(const std::vector<std::string>& values, const std::string& wanted) {
  return std::all_of(values.begin(), values.end(),
                     [&](const std::string& value) { return value == wanted; });
}

/// One attempt of all ranks to get a link of a kind. One that cannot have its part says so, and the
/// others give up as well.
class Attempt {
 public:
  using Link = std::shared_ptr<FastLink>;
  Attempt(Store& store, const FastMeeting& meeting, std::string kind)
      : store_(store), meeting_(meeting), kind_(std::move(kind)) {}

  /// `make` may call `look` while it waits for others.
  Link make(const std::function<Link()>& make) {
    Link link;
    std::string lack;
    try {
      link = make();
    } catch (const std::exception& error) {
      lack = "rank " + std::to_string(meeting_.rank) + ": " + error.what();
      store_.set(failed_key(), lack);
    }
    const auto lacks = exchange(store_, kind_ + "/made", meeting_, lack);
    if (are_all(lacks, "")) return link;
    const auto is_lack = [](const std::string& one) { return !one.empty(); };
    log_debug("rpc: no small calls over " + kind_ + ": " +
              *std::find_if(lacks.begin(), lacks.end(), is_lack));
    return nullptr;
  }
  /// Throws when a rank has failed.
  void look() {
    if (store_.check({failed_key()})) throw CommError(store_.get(failed_key()));
  }

 private:
  std::string failed_key() const { return "fast/" + kind_ + "/failed"; }

  Store& store_;
  const FastMeeting& meeting_;
  const std::string kind_;
};

std::shared_ptr<FastLink> meet_over_memory(Store& store, const FastMeeting& meeting) {
  static constexpr const char* kKey = "fast/memory/meeting";
  Attempt attempt(store, meeting, "memory");
  shm::SharedGroupOptions options;
  options.segment.rank = meeting.rank;
  options.segment.size = meeting.size;
  options.segment.slot_bytes = 64;  // Only the messages' memory is used.
  options.segment.message_bytes = RingLink::kRingBytes;
  options.segment.timeout = store.timeout();
  options.segment.group = "rpc";
  options.segment.look = [&](const std::vector<int>&) { attempt.look(); };
  const shm::Meeting place{[&](const std::string& value) { store.set(kKey, value); },
                           [&] { return store.get(kKey); }};
  return attempt.make([&]() -> std::shared_ptr<FastLink> {
    try {
      return std::make_shared<RingLink>(std::make_unique<shm::SharedGroup>(options, place));
    } catch (...) {
      if (meeting.rank == 0) store.set(kKey, kNone);  // Nobody need wait for it.
      throw;
    }
  });
}

std::shared_ptr<FastLink> meet_over_sockets(Store& store, const FastMeeting& meeting) {
  Attempt attempt(store, meeting, "TCP");
  return attempt.make([&]() -> std::shared_ptr<FastLink> {
    // Whoever fails hangs up, so that nobody waits for its answer.
    SocketMeeting sockets(meeting.rank, meeting.size, meeting.secret, meeting.job);
    std::string address;
    std::string lack;
    try {
      address = sockets.listen(meeting.host);
    } catch (const Error& error) {
      lack = error.what();
    }
    const auto addresses = exchange(store, "TCP/address", meeting, address);
    if (!lack.empty()) throw CommError(lack);
    if (std::count(addresses.begin(), addresses.end(), "") > 0) {
      throw CommError("another rank cannot listen");
    }
    SocketLink::Setup setup;
    setup.rank = meeting.rank;
    setup.has_processor = meeting.has_processor;
    setup.peers = sockets.connect(addresses, store.timeout(), [&] { attempt.look(); });
    return std::make_shared<SocketLink>(std::move(setup));
  });
}

/// "none", "TCP", or where this rank can share memory.
std::string wish_of(const FastMeeting& meeting) {
  if (!meeting.wanted) return kNone;
  const bool memory = meeting.shared_memory && meeting.secret.empty();
  const std::string place = memory ? shared_memory_place() : std::string();
  return place.empty() ? "TCP" : "memory " + place;
}

}  // namespace

std::shared_ptr<FastLink> meet(Store store, const FastMeeting& meeting) {
  const std::string wish = wish_of(meeting);
  const auto wishes = exchange(store, "wish", meeting, wish);
  if (std::count(wishes.begin(), wishes.end(), kNone) > 0) {
    log_debug("rpc: calls go LibTorch's way only: a rank wants it so");
    return nullptr;
  }
  if (wish != "TCP" && are_all(wishes, wish)) {
    if (auto link = meet_over_memory(store, meeting)) return link;
  }
  return meet_over_sockets(store, meeting);
}

}  // namespace lockstep::rpc::detail
