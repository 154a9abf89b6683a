#include "lockstep/rpc/socket_meeting.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
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

constexpr uint64_t kMagic = 0x6c6f636b72706301;  // "lockrpc", version 1
constexpr milliseconds kLongest{30'000};
/// Who has connected says at once who it is.
constexpr milliseconds kPatience{2'000};
constexpr milliseconds kBetweenLooks{50};
/// To connect; the others listen already.
constexpr milliseconds kAttempt{1'000};
/// A connection to a host that was cut off without a word fails after so long.
constexpr milliseconds kSilence{60'000};

/// Moves `size` bytes by `move`, recv or send. False when that fails or it gets late.
template <class Move>
bool move_all(int fd, short event, std::chrono::steady_clock::time_point deadline, size_t size,
              Move move) {
  for (size_t moved = 0; moved < size;) {
    const ssize_t now = move(moved);
    if (now > 0) {
      moved += static_cast<size_t>(now);
      continue;
    }
    if (now == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return false;
    const auto left = time_left(deadline);
    if (left.count() == 0) return false;
    pollfd entry{fd, event, 0};
    poll(&entry, 1, static_cast<int>(left.count()));
  }
  return true;
}

bool send_all(const UniqueFd& fd, const void* data, size_t size,
              std::chrono::steady_clock::time_point deadline) {
  return move_all(fd.get(), POLLOUT, deadline, size, [&](size_t moved) {
    return ::send(fd.get(), static_cast<const char*>(data) + moved, size - moved, MSG_NOSIGNAL);
  });
}

bool receive_all(const UniqueFd& fd, void* data, size_t size,
                 std::chrono::steady_clock::time_point deadline) {
  return move_all(fd.get(), POLLIN, deadline, size, [&](size_t moved) {
    return recv(fd.get(), static_cast<char*>(data) + moved, size - moved, 0);
  });
}

bool receive_proof(const UniqueFd& fd, const std::string& expected,
                   std::chrono::steady_clock::time_point deadline) {
  std::string proof(expected.size(), '\0');
  return receive_all(fd, proof.data(), proof.size(), deadline) &&
         CRYPTO_memcmp(proof.data(), expected.data(), expected.size()) == 0;
}

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

SocketMeeting::Hello SocketMeeting::own_hello() const {
  Hello hello;
  hello.magic = kMagic;
  hello.rank = rank_;
  random_hex(kNonce / 2).copy(hello.nonce, kNonce);
  return hello;
}

std::string SocketMeeting::Session::proof(const std::string& key, const char* what) const {
  std::string text(reinterpret_cast<const char*>(&lower), sizeof(lower));
  text.append(reinterpret_cast<const char*>(&higher), sizeof(higher));
  return hmac_sha256(key, text + what);
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

// The higher of two ranks calls. Each side says hello, then each shows what it knows.
SocketPeer SocketMeeting::call(int other, Clock::time_point deadline,
                               const std::atomic<bool>& stop) const {
  const Address address = address_of(addresses_[static_cast<size_t>(other)]);
  UniqueFd connection = connect_unless(stop, address, deadline);
  Session session;
  session.higher = own_hello();
  if (!send_all(connection, &session.higher, sizeof(Hello), deadline) ||
      !receive_all(connection, &session.lower, sizeof(Hello), deadline) ||
      session.lower.magic != kMagic || session.lower.rank != other ||
      !receive_proof(connection, session.proof(key_, "lower"), deadline)) {
    throw CommError("rpc: " + name_of(other, address) + " does not answer as a rank of this job");
  }
  const std::string proof = session.proof(key_, "higher");
  if (!send_all(connection, proof.data(), proof.size(), deadline)) {
    throw CommError("rpc: " + name_of(other, address) + " hung up");
  }
  return peer_of(std::move(connection), session, other);
}

SocketPeer SocketMeeting::answer(UniqueFd connection, Clock::time_point deadline,
                                 int& other) const {
  deadline = std::min(deadline, Clock::now() + kPatience);
  Session session;
  session.lower = own_hello();
  if (!receive_all(connection, &session.higher, sizeof(Hello), deadline) ||
      session.higher.magic != kMagic || session.higher.rank <= rank_ ||
      session.higher.rank >= size_ ||
      !send_all(connection, &session.lower, sizeof(Hello), deadline)) {
    return {};
  }
  const std::string proof = session.proof(key_, "lower");
  if (!send_all(connection, proof.data(), proof.size(), deadline) ||
      !receive_proof(connection, session.proof(key_, "higher"), deadline)) {
    return {};
  }
  other = static_cast<int>(session.higher.rank);
  return peer_of(std::move(connection), session, other);
}

std::vector<SocketPeer> SocketMeeting::connect(const std::vector<std::string>& addresses,
                                               milliseconds timeout,
                                               const std::function<void()>& look) {
  addresses_ = addresses;
  const auto deadline = Clock::now() + std::min(timeout, kLongest);
  std::vector<SocketPeer> peers(static_cast<size_t>(size_));
  std::atomic<bool> stop{false};
  // Beside the answers: so no rank waits for a row of others that wait for each other.
  auto calls = std::async(std::launch::async, [&] {
    for (int other = 0; other < rank_; ++other) {
      peers[static_cast<size_t>(other)] = call(other, deadline, stop);
    }
  });
  try {
    answer_all(peers, deadline, look);
    while (calls.wait_for(kBetweenLooks) != std::future_status::ready) look();
    calls.get();
  } catch (...) {
    stop = true;
    throw;  // The end of `calls` waits for its thread.
  }
  listener_.reset();
  return peers;
}

void SocketMeeting::answer_all(std::vector<SocketPeer>& peers, Clock::time_point deadline,
                               const std::function<void()>& look) const {
  for (int missing = size_ - 1 - rank_; missing > 0;) {
    if (time_left(deadline).count() == 0) {
      throw TimeoutError("rpc: " + std::to_string(missing) + " ranks have not connected");
    }
    const auto limit = std::min(kBetweenLooks, time_left(deadline));
    UniqueFd connection = accept_from(listener_.get(), limit);
    int other = -1;
    SocketPeer peer = connection ? answer(std::move(connection), deadline, other) : SocketPeer();
    if (peer.connection && !peers[static_cast<size_t>(other)].connection) {
      peers[static_cast<size_t>(other)] = std::move(peer);
      --missing;
    } else {
      look();
    }
  }
}

}  // namespace lockstep::rpc::detail
