#include "lockstep/rpc/socket_meeting.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/rpc/seal.h"

namespace lockstep::rpc::detail {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLongestMeeting{30'000};
/// Who has connected says at once who it is.
constexpr milliseconds kPatience{2'000};
/// Beyond so many that have not, besides the job's ranks, one goes. So many are let in at a time.
constexpr size_t kMostStrangers = 64;
constexpr milliseconds kBetweenLooks{50};
/// Between two calls of one rank.
constexpr milliseconds kBetweenCalls{1};
/// To connect; the others listen already.
constexpr milliseconds kAttempt{1'000};
/// A connection to a host that was cut off without a word fails after so long.
constexpr milliseconds kSilence{60'000};

struct Address {
  std::string host;
  uint16_t port = 0;
  std::string identity;
};

/// "10.0.0.1 4711 identity"
Address address_of(const std::string& text) {
  const size_t first = text.find(' ');
  const size_t second = first == std::string::npos ? first : text.find(' ', first + 1);
  const auto port = second == std::string::npos
                        ? std::nullopt
                        : parse_int(text.substr(first + 1, second - first - 1));
  if (!port || *port < 1 || *port > UINT16_MAX) throw DataError("rpc: no address: " + text);
  return {text.substr(0, first), static_cast<uint16_t>(*port), text.substr(second + 1)};
}

}  // namespace

SocketMeeting::SocketMeeting(int rank, int size, const std::string& secret, const std::string& job)
    : rank_(rank),
      size_(size),
      key_(hmac_sha256(secret, "small calls of " + job)),
      has_secret_(!secret.empty()) {}

std::string SocketMeeting::listen(const std::string& host) {
  if (host.empty()) throw CommError("rpc: this host has no address for small calls");
  listener_ = listen_on(host, 0);
  return bound_host(listener_.get()) + " " + std::to_string(bound_port(listener_.get())) + " " +
         process_identity();
}

std::string SocketMeeting::name_of(int other) const {
  const auto& identity = address_of(addresses_[static_cast<size_t>(other)]).identity;
  return with_process("rank " + std::to_string(other), identity);
}

SocketPeer SocketMeeting::peer_of(Handshake& known) const {
  SocketPeer peer;
  peer.connection = known.take_connection();
  const int on = 1;
  setsockopt(peer.connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  limit_silence_of(peer.connection.get(), kSilence);
  peer.name = name_of(known.rank());
  if (!has_secret_) return peer;
  const auto up = known.session().proof(key_, "upwards");
  const auto down = known.session().proof(key_, "downwards");
  peer.key_in = known.rank() < rank_ ? up : down;
  peer.key_out = known.rank() < rank_ ? down : up;
  return peer;
}

// The higher of two ranks calls.
Handshake SocketMeeting::call(int other, Clock::time_point deadline,
                              const std::function<void()>& look) const {
  const Address address = address_of(addresses_[static_cast<size_t>(other)]);
  while (true) {
    try {
      return {connect_to(address.host, address.port, std::min(kAttempt, time_left(deadline))),
              rank_, other, other, key_};
    } catch (const TimeoutError&) {
      look();
      if (time_left(deadline).count() == 0) throw;
    }
  }
}

std::vector<SocketPeer> SocketMeeting::connect(const std::vector<std::string>& addresses,
                                               milliseconds timeout,
                                               const std::function<void()>& look) {
  addresses_ = addresses;
  const auto deadline = Clock::now() + std::min(timeout, kLongestMeeting);
  Peers peers(static_cast<size_t>(size_));
  std::list<Handshake> calls, visitors;
  const Call call_again = [&](int other) { return call(other, deadline, look); };
  for (int other = 0; other < rank_; ++other) calls.push_back(call_again(other));
  Every now_and_then(kBetweenLooks);
  for (auto left = missing(peers); !left.empty(); left = missing(peers)) {
    if (time_left(deadline).count() == 0) {
      std::vector<std::string> names;
      for (const int other : left) names.push_back(name_of(other));
      throw TimeoutError("rpc: no connection to " + lockstep::join(names, ", "));
    }
    wait_for_words(calls, visitors, std::min(deadline, Clock::now() + kBetweenLooks));
    let_in(visitors);
    go_on_with(visitors, peers);
    go_on_with_calls(calls, peers, call_again);
    if (now_and_then.due()) look();
  }
  listener_.reset();
  return peers;
}

std::vector<int> SocketMeeting::missing(const Peers& peers) const {
  std::vector<int> ranks;
  for (int other = 0; other < size_; ++other) {
    if (other != rank_ && !peers[static_cast<size_t>(other)].connection) ranks.push_back(other);
  }
  return ranks;
}

void SocketMeeting::go_on_with_calls(std::list<Handshake>& calls, Peers& peers,
                                     const Call& call_again) const {
  for (auto one = calls.begin(); one != calls.end();) {
    const int other = one->rank();
    switch (one->go_on()) {
      case Handshake::State::talks:
        ++one;
        continue;
      case Handshake::State::known:
        peers[static_cast<size_t>(other)] = peer_of(*one);
        break;
      case Handshake::State::hung_up:  // Perhaps this rank was too slow.
        std::this_thread::sleep_for(kBetweenCalls);
        calls.push_front(call_again(other));
        break;
      case Handshake::State::a_stranger:
        throw CommError("rpc: " + name_of(other) + " does not answer as a rank of this job");
    }
    one = calls.erase(one);
  }
}

void SocketMeeting::wait_for_words(const std::list<Handshake>& calls,
                                   const std::list<Handshake>& visitors,
                                   Clock::time_point deadline) const {
  std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
  for (const auto* all : {&calls, &visitors}) {
    for (const Handshake& one : *all) entries.push_back({one.descriptor(), POLLIN, 0});
  }
  const int found =
      poll(entries.data(), entries.size(), static_cast<int>(time_left(deadline).count()));
  if (found < 0 && errno != EINTR) throw SystemError("poll", errno);
}

void SocketMeeting::let_in(std::list<Handshake>& visitors) const {
  for (size_t come = 0; come < kMostStrangers; ++come) {
    try {
      UniqueFd connection = accept_from(listener_.get(), milliseconds(0));
      if (!connection) return;
      visitors.emplace_back(std::move(connection), rank_, rank_ + 1, size_ - 1, key_);
    } catch (const SystemError&) {  // Too many open files, perhaps: one goes, the next turn tries.
      if (visitors.empty()) throw;
      turn_away_one(visitors);
      return;
    }
  }
}

void SocketMeeting::turn_away_one(std::list<Handshake>& visitors) {
  const auto silent = std::find_if(visitors.begin(), visitors.end(), [](const Handshake& visitor) {
    return !visitor.has_said_hello();
  });
  visitors.erase(silent == visitors.end() ? visitors.begin() : silent);
}

void SocketMeeting::go_on_with(std::list<Handshake>& visitors, Peers& peers) const {
  const auto earliest = Clock::now() - kPatience;
  for (auto visitor = visitors.begin(); visitor != visitors.end();) {
    const auto state = visitor->go_on();
    if (state == Handshake::State::talks && visitor->begun() > earliest) {
      ++visitor;
      continue;
    }
    // One that has called again takes the place of its first connection, which it gave up.
    if (state == Handshake::State::known) {
      peers[static_cast<size_t>(visitor->rank())] = peer_of(*visitor);
    }
    visitor = visitors.erase(visitor);
  }
  while (visitors.size() > kMostStrangers + static_cast<size_t>(size_)) turn_away_one(visitors);
}

}  // namespace lockstep::rpc::detail
