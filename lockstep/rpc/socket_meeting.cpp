#include "lockstep/rpc/socket_meeting.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

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
constexpr milliseconds kBetweenLooks{50};
/// To connect; the others listen already.
constexpr milliseconds kAttempt{1'000};
/// A connection to a host that was cut off without a word fails after so long.
constexpr milliseconds kSilence{60'000};

struct Hello {
  uint64_t magic = 0x6c6f636b72706304;  ///< "lockrpc", version 4, of one byte order.
  int64_t rank = -1;
  char nonce[32] = {};
};

std::string hello_of(int rank) {
  Hello hello;
  hello.rank = rank;
  random_hex(sizeof(hello.nonce) / 2).copy(hello.nonce, sizeof(hello.nonce));
  return {reinterpret_cast<const char*>(&hello), sizeof(hello)};
}

/// -1: it is no hello of ours.
int rank_in(const std::string& bytes) {
  Hello hello;
  const uint64_t magic = hello.magic;
  std::memcpy(&hello, bytes.data(), sizeof(hello));
  return hello.magic == magic ? static_cast<int>(hello.rank) : -1;
}

/// As little as a new connection always takes at once.
void say(int connection, const std::string& text) {
  const auto sent = ::send(connection, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(text.size())) throw CommError("rpc: the other end hung up");
}

/// Reads no more than that, as messages may follow.
std::string hear(int connection, size_t bytes, std::chrono::steady_clock::time_point deadline,
                 const std::function<void()>& look) {
  std::string word(bytes, '\0');
  for (size_t place = 0; place < bytes;) {
    const ssize_t got = recv(connection, word.data() + place, bytes - place, MSG_DONTWAIT);
    if (got > 0) {
      place += static_cast<size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      throw CommError("rpc: the other end hung up");
    } else {
      if (time_left(deadline).count() == 0) throw TimeoutError("rpc: the other end says nothing");
      pollfd entry{connection, POLLIN, 0};
      poll(&entry, 1, static_cast<int>(std::min(kBetweenLooks, time_left(deadline)).count()));
      look();
    }
  }
  return word;
}

struct Address {
  std::string host;
  uint16_t port = 0;
  std::string identity;
};

/// "10.0.0.1 4711 identity"
Address address_of(const std::string& text) {
  const auto parts = split(text, ' ');
  const auto port = parts.size() < 3 ? std::nullopt : parse_int(parts[1]);
  if (!port || *port < 1 || *port > UINT16_MAX) throw DataError("rpc: no address: " + text);
  return {parts[0], static_cast<uint16_t>(*port), parts[2]};
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

/// Shows to the other end of this connection that one knows the key.
std::string SocketMeeting::proof(const std::string& session, const char* what) const {
  return hmac_sha256(key_, session + what);
}

SocketPeer SocketMeeting::peer_of(UniqueFd connection, int other,
                                  const std::string& session) const {
  SocketPeer peer;
  peer.connection = std::move(connection);
  const int on = 1;
  setsockopt(peer.connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  limit_silence_of(peer.connection.get(), kSilence);
  peer.name = name_of(other);
  if (!has_secret_) return peer;
  peer.key_in = proof(session, other < rank_ ? "upwards" : "downwards");
  peer.key_out = proof(session, other < rank_ ? "downwards" : "upwards");
  return peer;
}

SocketPeer SocketMeeting::call(int other, Clock::time_point deadline,
                               const std::function<void()>& look) const {
  const Address address = address_of(addresses_[static_cast<size_t>(other)]);
  UniqueFd connection;
  while (!connection) {
    try {
      connection = connect_to(address.host, address.port, std::min(kAttempt, time_left(deadline)));
    } catch (const TimeoutError&) {
      look();
      if (time_left(deadline).count() == 0) throw;
    }
  }
  const std::string own = hello_of(rank_);
  say(connection.get(), own);
  const std::string its = hear(connection.get(), sizeof(Hello), deadline, look);
  const std::string session = its + own;
  const std::string shown = hear(connection.get(), kCodeBytes, deadline, look);
  if (rank_in(its) != other || !same_code(shown, proof(session, "lower"))) {
    throw CommError("rpc: " + name_of(other) + " does not answer as a rank of this job");
  }
  say(connection.get(), proof(session, "higher"));
  return peer_of(std::move(connection), other, session);
}

std::optional<int> SocketMeeting::answer(UniqueFd connection,
                                         std::vector<SocketPeer>& peers) const {
  const auto deadline = Clock::now() + kPatience;
  try {
    const std::string its = hear(connection.get(), sizeof(Hello), deadline, [] {});
    const int other = rank_in(its);
    if (other <= rank_ || other >= size_) return std::nullopt;
    const std::string own = hello_of(rank_), session = own + its;
    say(connection.get(), own + proof(session, "lower"));
    const std::string shown = hear(connection.get(), kCodeBytes, deadline, [] {});
    if (!same_code(shown, proof(session, "higher"))) return std::nullopt;
    peers[static_cast<size_t>(other)] = peer_of(std::move(connection), other, session);
    return other;
  } catch (const CommError&) {  // It hung up, or said nothing in time.
    return std::nullopt;
  }
}

std::vector<SocketPeer> SocketMeeting::connect(const std::vector<std::string>& addresses,
                                               milliseconds timeout,
                                               const std::function<void()>& look) {
  addresses_ = addresses;
  const auto deadline = Clock::now() + std::min(timeout, kLongestMeeting);
  std::vector<SocketPeer> peers(static_cast<size_t>(size_));
  for (int other = 0; other < rank_; ++other) {
    peers[static_cast<size_t>(other)] = call(other, deadline, look);
  }
  std::set<int> missing;
  for (int other = rank_ + 1; other < size_; ++other) missing.insert(other);
  while (!missing.empty()) {
    UniqueFd connection =
        accept_from(listener_.get(), std::min(kBetweenLooks, time_left(deadline)));
    if (connection) {
      if (const auto other = answer(std::move(connection), peers)) missing.erase(*other);
    }
    look();
    if (missing.empty() || time_left(deadline).count() > 0) continue;
    std::vector<std::string> names;
    for (const int other : missing) names.push_back(name_of(other));
    throw TimeoutError("rpc: no connection from " + lockstep::join(names, ", "));
  }
  listener_.reset();
  return peers;
}

}  // namespace lockstep::rpc::detail
