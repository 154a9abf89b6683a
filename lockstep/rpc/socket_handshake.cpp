#include "lockstep/rpc/socket_handshake.h"

#include <openssl/crypto.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/poll_pause.h"
#include "lockstep/rpc/seal.h"

namespace lockstep::rpc::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMagic = 0x6c6f636b72706302;  // "lockrpc", version 2
constexpr size_t kProofBytes = 32;
constexpr const char *kOfLower = "lower", *kOfHigher = "higher", *kLastWord = "taken";

Session::Hello hello_of(int rank) {
  Session::Hello hello;
  hello.magic = kMagic;
  hello.rank = rank;
  random_hex(Session::kNonce / 2).copy(hello.nonce, Session::kNonce);
  return hello;
}

std::string bytes_of(const Session::Hello& hello) {
  return {reinterpret_cast<const char*>(&hello), sizeof(hello)};
}

bool are_equal(const std::string& one, const std::string& other) {
  return one.size() == other.size() && CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

/// Moves `size` bytes by `move`, recv or send. False when that fails, it gets late or `stop` is
/// set.
template <class Move>
bool move_all(pollfd entry, const std::atomic<bool>& stop, Clock::time_point deadline, size_t size,
              Move move) {
  constexpr std::chrono::milliseconds kBetweenLooks{50};
  for (size_t moved = 0; moved < size;) {
    const ssize_t now = move(moved);
    if (now > 0) {
      moved += static_cast<size_t>(now);
      continue;
    }
    if (now == 0 || !would_block()) return false;
    const auto left = std::min(kBetweenLooks, time_left(deadline));
    if (left.count() == 0 || stop) return false;
    poll(&entry, 1, static_cast<int>(left.count()));
  }
  return true;
}

}  // namespace

std::string Session::proof(const std::string& key, const char* what) const {
  return hmac_sha256(key, bytes_of(lower) + bytes_of(higher) + what);
}

bool Caller::send_all(const UniqueFd& to, const std::string& text,
                      Clock::time_point deadline) const {
  return move_all({to.get(), POLLOUT, 0}, stop_, deadline, text.size(), [&](size_t moved) {
    return ::send(to.get(), text.data() + moved, text.size() - moved, MSG_NOSIGNAL);
  });
}

bool Caller::receive_all(const UniqueFd& from, void* data, size_t size,
                         Clock::time_point deadline) const {
  return move_all({from.get(), POLLIN, 0}, stop_, deadline, size, [&](size_t moved) {
    return recv(from.get(), static_cast<char*>(data) + moved, size - moved, 0);
  });
}

Caller::End Caller::greet(const UniqueFd& connection, int other, Clock::time_point deadline) {
  session_ = {};
  session_.higher = hello_of(rank_);
  const auto shows = [&](const char* what, bool& right) {
    std::string proof(kProofBytes, '\0');
    if (!receive_all(connection, proof.data(), proof.size(), deadline)) return false;
    right = are_equal(proof, session_.proof(key_, what));
    return true;
  };
  bool right = false;
  if (!send_all(connection, bytes_of(session_.higher), deadline) ||
      !receive_all(connection, &session_.lower, sizeof(session_.lower), deadline)) {
    return End::hung_up;
  }
  if (session_.lower.magic != kMagic || session_.lower.rank != other) return End::a_stranger;
  if (!shows(kOfLower, right)) return End::hung_up;
  if (!right) return End::a_stranger;
  if (!send_all(connection, session_.proof(key_, kOfHigher), deadline) ||
      !shows(kLastWord, right)) {
    return End::hung_up;
  }
  return right ? End::known : End::a_stranger;
}

Visitor::Visitor(UniqueFd connection, int own_rank, int size, std::string key)
    : connection_(std::move(connection)), own_rank_(own_rank), size_(size), key_(std::move(key)) {}

Visitor::State Visitor::go_on() {
  bool gone = false;
  if (!has_said_hello_) {
    if (!has_read(sizeof(Session::Hello), gone)) return gone ? State::gone : State::talks;
    if (on_hello() == State::gone) return State::gone;
  }
  if (!has_read(kProofBytes, gone)) return gone ? State::gone : State::talks;
  return on_proof();
}

/// Reads no more than that, as messages may follow. `gone`: no more comes.
bool Visitor::has_read(size_t bytes, bool& gone) {
  while (in_.size() < bytes) {
    const size_t before = in_.size();
    in_.resize(bytes);
    const ssize_t got = recv(connection_.get(), in_.data() + before, bytes - before, MSG_DONTWAIT);
    in_.resize(before + static_cast<size_t>(got > 0 ? got : 0));
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    gone = got == 0 || !would_block();
    return false;
  }
  return true;
}

/// As little as a new connection always takes at once.
bool Visitor::say(const std::string& text) const {
  return ::send(connection_.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(text.size());
}

Visitor::State Visitor::on_hello() {
  std::memcpy(&session_.higher, in_.data(), sizeof(session_.higher));
  in_.clear();
  has_said_hello_ = true;
  const auto& its = session_.higher;
  if (its.magic != kMagic || its.rank <= own_rank_ || its.rank >= size_) return State::gone;
  session_.lower = hello_of(own_rank_);
  const bool said = say(bytes_of(session_.lower) + session_.proof(key_, kOfLower));
  return said ? State::talks : State::gone;
}

Visitor::State Visitor::on_proof() {
  if (!are_equal(in_, session_.proof(key_, kOfHigher))) return State::gone;
  return say(session_.proof(key_, kLastWord)) ? State::known : State::gone;
}

}  // namespace lockstep::rpc::detail
