#include "lockstep/rpc/fast_meeting.h"

#include <algorithm>
#include <functional>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/host_key.h"
#include "lockstep/rpc/ring_link.h"
#include "lockstep/rpc/socket_meeting.h"

namespace lockstep::rpc::detail {

std::vector<std::string> exchange(Store& store, const std::string& key, int rank, int size,
                                  const std::string& value) {
  const auto keys = numbered_keys(key + "/", size);
  store.set(keys[static_cast<size_t>(rank)], value);
  return store.multi_get(keys);
}

namespace {

constexpr const char* kNone = "none";

bool are_all(const std::vector<std::string>& values, const std::string& wanted) {
  return std::all_of(values.begin(), values.end(),
                     [&](const std::string& value) { return value == wanted; });
}

/// Throws when another rank has failed.
using Look = std::function<void()>;

std::shared_ptr<FastLink> meet_over_memory(Store& store, const FastMeeting& meeting,
                                           const Look& look) {
  static constexpr const char* kKey = "fast/memory";
  shm::SharedGroupOptions options;
  options.segment.rank = meeting.rank;
  options.segment.size = meeting.size;
  options.segment.slot_bytes = 64;  // Only the messages' memory is used.
  options.segment.message_bytes = RingLink::kRingBytes;
  options.segment.timeout = store.timeout();
  options.segment.group = "rpc";
  options.segment.look = [&](const std::vector<int>&) { look(); };
  const shm::Meeting over_store{[&](const std::string& value) { store.set(kKey, value); },
                                [&] { return store.get(kKey); }};
  try {
    return std::make_shared<RingLink>(std::make_unique<shm::SharedGroup>(options, over_store));
  } catch (...) {
    if (meeting.rank == 0) store.set(kKey, kNone);  // Nobody need wait for it.
    throw;
  }
}

std::shared_ptr<FastLink> meet_over_sockets(Store& store, const FastMeeting& meeting,
                                            const Look& look) {
  SocketMeeting sockets(meeting.rank, meeting.size, meeting.secret, meeting.job);
  std::string address, lack;
  try {
    address = sockets.listen(meeting.host);
  } catch (const Error& error) {
    lack = error.what();
  }
  const auto addresses = exchange(store, "fast/TCP/address", meeting.rank, meeting.size, address);
  if (!lack.empty()) throw CommError(lack);
  if (std::count(addresses.begin(), addresses.end(), "") > 0) {
    throw CommError("another rank cannot listen");
  }
  return std::make_shared<SocketLink>(
      meeting.rank, sockets.connect(addresses, store.timeout(), look), meeting.has_processor);
}

/// "none", "TCP", or where this rank can share memory.
std::string wish_of(const FastMeeting& meeting) {
  if (!meeting.wanted) return kNone;
  const bool memory = meeting.shared_memory && meeting.secret.empty();
  const std::string key = memory ? host_key() : std::string();
  return key.empty() ? "TCP" : "memory " + key;
}

}  // namespace

std::shared_ptr<FastLink> meet(Store store, const FastMeeting& meeting) {
  const std::string wish = wish_of(meeting);
  const auto wishes = exchange(store, "fast/wish", meeting.rank, meeting.size, wish);
  if (std::count(wishes.begin(), wishes.end(), kNone) > 0) {
    log_debug("rpc: calls go LibTorch's way only: a rank wants it so");
    return nullptr;
  }
  const bool memory = wish != "TCP" && are_all(wishes, wish);
  static constexpr const char* kFailed = "fast/failed";
  const Look look = [&] {
    if (store.check({kFailed})) throw CommError(store.get(kFailed));
  };
  std::shared_ptr<FastLink> link;
  std::string lack;
  try {
    link =
        memory ? meet_over_memory(store, meeting, look) : meet_over_sockets(store, meeting, look);
  } catch (const std::exception& error) {
    lack = "rank " + std::to_string(meeting.rank) + ": " + error.what();
    store.set(kFailed, lack);
  }
  const auto lacks = exchange(store, "fast/made", meeting.rank, meeting.size, lack);
  if (are_all(lacks, "")) return link;
  const auto is_lack = [](const std::string& one) { return !one.empty(); };
  log_debug("rpc: calls go LibTorch's way only: " +
            *std::find_if(lacks.begin(), lacks.end(), is_lack));
  return nullptr;
}

}  // namespace lockstep::rpc::detail
