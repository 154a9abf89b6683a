#include "lockstep/rpc/socket_handshake.h"

#include <openssl/crypto.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "lockstep/base/text.h"
#include "lockstep/rpc/seal.h"

namespace lockstep::rpc::detail {
namespace {

constexpr uint64_t kMagic = 0x6c6f636b72706303;  // "lockrpc", version 3
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

}  // namespace

std::string Session::proof(const std::string& key, const char* what) const {
  return hmac_sha256(key, bytes_of(lower) + bytes_of(higher) + what);
}

Handshake::Handshake(UniqueFd connection, int own_rank, int first, int last, std::string key)
    : connection_(std::move(connection)),
      own_rank_(own_rank),
      first_(first),
      last_(last),
      key_(std::move(key)) {
  if (!calls()) return;
  session_.higher = hello_of(own_rank_);
  state_ = say(bytes_of(session_.higher), State::talks);
}

int Handshake::rank() const {
  return calls() ? first_ : static_cast<int>(session_.higher.rank);
}

Handshake::State Handshake::go_on() {
  while (state_ == State::talks && has_read(heard_ == 0 ? sizeof(Session::Hello) : kCodeBytes)) {
    state_ = heard_ == 0 ? on_hello() : on_proof();
    ++heard_;
    in_.clear();
  }
  return state_;
}

/// Reads no more than that, as messages may follow.
bool Handshake::has_read(size_t bytes) {
  while (in_.size() < bytes) {
    const size_t before = in_.size();
    in_.resize(bytes);
    const ssize_t got = recv(connection_.get(), in_.data() + before, bytes - before, MSG_DONTWAIT);
    in_.resize(before + static_cast<size_t>(got > 0 ? got : 0));
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) state_ = State::hung_up;
    return false;
  }
  return true;
}

/// As little as a new connection always takes at once.
Handshake::State Handshake::say(const std::string& text, State then) const {
  const auto sent =
      ::send(connection_.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  return sent == static_cast<ssize_t>(text.size()) ? then : State::hung_up;
}

Handshake::State Handshake::on_hello() {
  Session::Hello& its = calls() ? session_.lower : session_.higher;
  std::memcpy(&its, in_.data(), sizeof(its));
  if (its.magic != kMagic || its.rank < first_ || its.rank > last_) return State::a_stranger;
  if (calls()) return State::talks;
  session_.lower = hello_of(own_rank_);
  return say(bytes_of(session_.lower) + session_.proof(key_, kOfLower), State::talks);
}

Handshake::State Handshake::on_proof() {
  const bool is_last = heard_ == 2;
  const std::string right = session_.proof(key_, !calls()  ? kOfHigher
                                                 : is_last ? kLastWord
                                                           : kOfLower);
  if (CRYPTO_memcmp(in_.data(), right.data(), kCodeBytes) != 0) return State::a_stranger;
  if (!calls()) return say(session_.proof(key_, kLastWord), State::known);
  return is_last ? State::known : say(session_.proof(key_, kOfHigher), State::talks);
}

}  // namespace lockstep::rpc::detail
