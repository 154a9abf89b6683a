#include "lockstep/rpc/fast_meeting.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/hmac.h"
#include "lockstep/base/log.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/socket_meeting.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/host_key.h"
#include "lockstep/rpc/ring_link.h"
#include "lockstep/rpc/socket_link.h"

namespace lockstep::rpc::detail {

std::vector<std::string> exchange(Store& store, const std::string& key, int rank, int size,
                                  const std::string& value) {
  const auto keys = numbered_keys(key + "/", size);
  store.set(keys[static_cast<size_t>(rank)], value);
  return store.multi_get(keys);
}

namespace {

constexpr const char* kNone = "none";

/// Throws when another rank has failed.
using Look = std::function<void()>;

std::shared_ptr<FastLink> meet_over_memory(Store& store, const FastMeeting& meeting,
                                           const Look& look) {
  static constexpr const char* kKey = "fast/memory";
  shm::SharedGroupOptions options;
  options.rank = meeting.rank;
  options.size = meeting.size;
  options.slot_bytes = 64;  // Only the messages' memory is used.
  options.message_bytes = RingLink::kRingBytes;
  options.timeout = store.timeout();
  options.group = "rpc";
  options.look = [&](const std::vector<int>&) { look(); };
  const shm::Meeting over_store{
      [&](const std::string& value) { store.set(kKey, value); },
      [&] { return store.check({kKey}) ? store.get(kKey) : std::string(); }};
  return std::make_shared<RingLink>(std::make_unique<shm::SharedGroup>(options, over_store));
}

/// A connection to a host that was cut off without a word fails after so long.
constexpr std::chrono::milliseconds kSilence{60'000};

SocketPeer peer_of(MetPeer met, int other, int self, const std::string& key, bool sealed) {
  SocketPeer peer;
  peer.connection = std::move(met.connection);
  const int on = 1;
  setsockopt(peer.connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  limit_silence_of(peer.connection.get(), kSilence);
  peer.name = "rank " + std::to_string(other);
  if (!sealed) return peer;
  peer.key_in = hmac_sha256(key, met.session + (other < self ? "upwards" : "downwards"));
  peer.key_out = hmac_sha256(key, met.session + (other < self ? "downwards" : "upwards"));
  return peer;
}

std::shared_ptr<FastLink> meet_over_sockets(Store& store, const FastMeeting& meeting,
                                            const Look& look) {
  const std::string key = hmac_sha256(meeting.secret, "small calls of " + meeting.job);
  SocketMeeting sockets({.self = meeting.rank,
                         .names = numbered_keys("rank ", meeting.size),
                         .key = key,
                         .hint = "TP_SOCKET_IFNAME names the network interface"});
  const auto addresses =
      exchange(store, "fast/TCP/address", meeting.rank, meeting.size, sockets.listen(meeting.host));
  auto met = sockets.connect(addresses, store.timeout(), [&](const auto&) { look(); });
  std::vector<SocketPeer> peers(met.size());
  for (int other = 0; other < meeting.size; ++other) {
    const auto at = static_cast<size_t>(other);
    if (other != meeting.rank)
      peers[at] = peer_of(std::move(met[at]), other, meeting.rank, key, !meeting.secret.empty());
  }
  return std::make_shared<SocketLink>(meeting.rank, std::move(peers), meeting.has_processor);
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
  const bool memory =
      wish != "TCP" && std::count(wishes.begin(), wishes.end(), wish) == meeting.size;
  static constexpr const char* kFailed = "fast/failed";
  const Look look = [&] {
    if (store.check({kFailed})) throw CommError(store.get(kFailed));
  };
  std::shared_ptr<FastLink> link;
  std::string failed;
  try {
    link =
        memory ? meet_over_memory(store, meeting, look) : meet_over_sockets(store, meeting, look);
  } catch (const std::exception& error) {
    const std::string mine = "rank " + std::to_string(meeting.rank) + ": " + error.what();
    failed = store.compare_set(kFailed, "", mine);
  }
  for (const auto& one : exchange(store, "fast/made", meeting.rank, meeting.size, failed)) {
    if (!one.empty())
      throw CommError("rpc: the ranks cannot connect for small calls: " + one,
                      "Options::fast_calls = false sends them through LibTorch's RPC");
  }
  return link;
}

}  // namespace lockstep::rpc::detail
