#include "lockstep/rpc/socket_meeting.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <future>

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

std::string name_of(int rank, const Address& address) {
  return with_process("rank " + std::to_string(rank), address.identity);
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

SocketPeer SocketMeeting::peer_of(UniqueFd connection, const Session& session, int other) const {
  const int on = 1;
  setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  limit_silence_of(connection.get(), kSilence);
  SocketPeer peer;
  peer.connection = std::move(connection);
  peer.name = name_of(other, address_of(addresses_[static_cast<size_t>(other)]));
  if (!has_secret_) return peer;
  const std::string up = session.proof(key_, "upwards"), down = session.proof(key_, "downwards");
  peer.key_in = other < rank_ ? up : down;
  peer.key_out = other < rank_ ? down : up;
  return peer;
}

namespace {

/// `stop` counts between the attempts.
UniqueFd connect_unless(const std::atomic<bool>& stop, const Address& address,
                        std::chrono::steady_clock::time_point deadline) {
  while (true) {
    try {
      return connect_to(address.host, address.port, std::min(kAttempt, time_left(deadline)));
    } catch (const TimeoutError&) {
      if (stop || time_left(deadline).count() == 0) throw;
    }
  }
}

}  // namespace

// The higher of two ranks calls. One that was hung up on calls again: it may have been too slow.
SocketPeer SocketMeeting::call(int other, Clock::time_point deadline,
                               const std::atomic<bool>& stop) const {
  const Address address = address_of(addresses_[static_cast<size_t>(other)]);
  for (PollPause pause;; pause.sleep()) {
    UniqueFd connection = connect_unless(stop, address, deadline);
    Caller caller(rank_, key_, stop);
    switch (caller.greet(connection, other, deadline)) {
      case Caller::End::known:
        return peer_of(std::move(connection), caller.session(), other);
      case Caller::End::a_stranger:
        throw CommError("rpc: " + name_of(other, address) +
                        " does not answer as a rank of this job");
      case Caller::End::hung_up:
        if (stop || time_left(deadline).count() == 0)
          throw CommError("rpc: " + name_of(other, address) + " hung up");
    }
  }
}

std::vector<SocketPeer> SocketMeeting::connect(const std::vector<std::string>& addresses,
                                               milliseconds timeout,
                                               const std::function<void()>& look) {
  addresses_ = addresses;
  const auto deadline = Clock::now() + std::min(timeout, kLongestMeeting);
  Peers called(static_cast<size_t>(rank_)), answered(static_cast<size_t>(size_));
  std::atomic<bool> stop{false};
  // Beside the answers: so no rank waits for a row of others that wait for each other.
  auto calls = std::async(std::launch::async, [&] {
    for (int other = 0; other < rank_; ++other) {
      called[static_cast<size_t>(other)] = call(other, deadline, stop);
    }
  });
  const auto calls_end_within = [&](milliseconds limit) {
    const bool over = calls.valid() && calls.wait_for(limit) == std::future_status::ready;
    if (over) calls.get();
    return !calls.valid();
  };
  try {
    answer_all(answered, deadline, [&] {
      look();
      calls_end_within(milliseconds(0));
    });
    while (!calls_end_within(kBetweenLooks)) look();
  } catch (...) {
    stop = true;
    throw;  // The end of `calls` waits for its thread.
  }
  listener_.reset();
  std::move(called.begin(), called.end(), answered.begin());
  return answered;
}

void SocketMeeting::answer_all(Peers& peers, Clock::time_point deadline,
                               const std::function<void()>& look) const {
  const auto missing = [&] {
    return std::count_if(peers.begin() + rank_ + 1, peers.end(),
                         [](const SocketPeer& peer) { return !peer.connection; });
  };
  std::list<Visitor> visitors;
  Every now_and_then(kBetweenLooks);
  while (const auto lacking = missing()) {
    if (time_left(deadline).count() == 0) {
      throw TimeoutError("rpc: " + std::to_string(lacking) + " ranks have not connected");
    }
    wait_for_words(visitors, std::min(deadline, Clock::now() + kBetweenLooks));
    let_in(visitors);
    go_on_with(visitors, peers);
    if (now_and_then.due()) look();
  }
}

void SocketMeeting::wait_for_words(const std::list<Visitor>& visitors,
                                   Clock::time_point deadline) const {
  std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
  for (const Visitor& visitor : visitors) entries.push_back({visitor.descriptor(), POLLIN, 0});
  const int found =
      poll(entries.data(), entries.size(), static_cast<int>(time_left(deadline).count()));
  if (found < 0 && errno != EINTR) throw SystemError("poll", errno);
}

void SocketMeeting::let_in(std::list<Visitor>& visitors) const {
  for (size_t come = 0; come < kMostStrangers; ++come) {
    try {
      UniqueFd connection = accept_from(listener_.get(), milliseconds(0));
      if (!connection) return;
      visitors.emplace_back(std::move(connection), rank_, size_, key_);
    } catch (const SystemError&) {  // Too many open files, perhaps: one goes, the next turn tries.
      if (visitors.empty()) throw;
      turn_away_one(visitors);
      return;
    }
  }
}

void SocketMeeting::turn_away_one(std::list<Visitor>& visitors) {
  const auto silent = std::find_if(visitors.begin(), visitors.end(), [](const Visitor& visitor) {
    return !visitor.has_said_hello();
  });
  visitors.erase(silent == visitors.end() ? visitors.begin() : silent);
}

void SocketMeeting::go_on_with(std::list<Visitor>& visitors, Peers& peers) const {
  const auto earliest = Clock::now() - kPatience;
  for (auto visitor = visitors.begin(); visitor != visitors.end();) {
    const auto state = visitor->go_on();
    if (state == Visitor::State::talks && visitor->came() > earliest) {
      ++visitor;
      continue;
    }
    // One that has called again takes the place of its first connection, which it gave up.
    if (state == Visitor::State::known) {
      const int other = visitor->rank();
      peers[static_cast<size_t>(other)] =
          peer_of(visitor->take_connection(), visitor->session(), other);
    }
    visitor = visitors.erase(visitor);
  }
  while (visitors.size() > kMostStrangers + static_cast<size_t>(size_)) turn_away_one(visitors);
}

}  // namespace lockstep::rpc::detail
