#include "lockstep/base/socket_meeting.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/hmac.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

/// Who has connected says at once who it is.
constexpr milliseconds kPatience{2'000};
constexpr milliseconds kBetweenLooks{50};
/// To connect; the others listen already.
constexpr milliseconds kAttempt{1'000};

struct Hello {
  uint64_t magic = 0x6c6f636b6d656574;  ///< "lockmeet", of one byte order.
  int64_t member = -1;
  char nonce[32] = {};
};

std::string hello_of(int member) {
  Hello hello;
  hello.member = member;
  random_hex(sizeof(hello.nonce) / 2).copy(hello.nonce, sizeof(hello.nonce));
  return {reinterpret_cast<const char*>(&hello), sizeof(hello)};
}

/// -1: it is no hello of ours.
int member_in(const std::string& bytes) {
  Hello hello;
  const uint64_t magic = hello.magic;
  std::memcpy(&hello, bytes.data(), sizeof(hello));
  return hello.magic == magic ? static_cast<int>(hello.member) : -1;
}

/// As little as a new connection always takes at once.
void say(int connection, const std::string& text) {
  const auto sent = ::send(connection, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(text.size())) throw CommError("the other end hung up");
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
      throw CommError("the other end hung up");
    } else {
      if (time_left(deadline).count() == 0) throw TimeoutError("the other end says nothing");
      pollfd entry{connection, POLLIN, 0};
      poll(&entry, 1, static_cast<int>(std::min(kBetweenLooks, time_left(deadline)).count()));
      look();
    }
  }
  return word;
}

/// "10.0.0.1 4711"
std::pair<std::string, uint16_t> parse_address(const std::string& text) {
  const auto parts = split(text, ' ');
  const auto port = parts.size() == 2 ? parse_int(parts[1]) : std::nullopt;
  if (!port || *port < 1 || *port > UINT16_MAX) throw DataError("no address: " + text);
  return {parts[0], static_cast<uint16_t>(*port)};
}

}  // namespace

std::string SocketMeeting::listen(const std::string& host) {
  if (host.empty()) throw CommError("this host has no address at which others reach it");
  listener_ = listen_on(host, 0);
  return bound_host(listener_.get()) + " " + std::to_string(bound_port(listener_.get()));
}

/// Shows to the other end of this connection that one knows the key.
std::string SocketMeeting::proof(const std::string& session, const char* what) const {
  return hmac_sha256(options_.key, session + what);
}

void SocketMeeting::throw_missing(int other, const std::string& why) const {
  throw TimeoutError(options_.names[static_cast<size_t>(other)] + " did not come within " +
                         seconds_text(timeout_) + ": " + why,
                     options_.hint);
}

MetPeer SocketMeeting::call(int other, const std::string& address, Clock::time_point deadline,
                            const Look& look) const {
  const auto [host, port] = parse_address(address);
  UniqueFd connection;
  while (!connection) {
    try {
      connection = connect_to(host, port, std::min(kAttempt, time_left(deadline)));
    } catch (const TimeoutError&) {
      look();  // It listened when it told where: it may have ended since.
      if (time_left(deadline).count() == 0)
        throw_missing(other, "nothing answers from " + endpoint_text(host, port));
    }
  }
  const std::string own = hello_of(options_.self);
  say(connection.get(), own);
  const std::string its = hear(connection.get(), sizeof(Hello), deadline, look);
  const std::string session = its + own;
  const std::string shown = hear(connection.get(), kHmacBytes, deadline, look);
  if (member_in(its) != other || !same_code(shown, proof(session, "lower"))) {
    throw CommError(options_.names[static_cast<size_t>(other)] +
                    " does not answer as a member of this group");
  }
  say(connection.get(), proof(session, "higher"));
  return {std::move(connection), session};
}

std::optional<int> SocketMeeting::answer(UniqueFd connection, std::vector<MetPeer>& peers) const {
  const auto deadline = Clock::now() + kPatience;
  try {
    const std::string its = hear(connection.get(), sizeof(Hello), deadline, [] {});
    const int other = member_in(its);
    if (other <= options_.self || other >= static_cast<int>(peers.size())) return std::nullopt;
    const std::string own = hello_of(options_.self), session = own + its;
    say(connection.get(), own + proof(session, "lower"));
    const std::string shown = hear(connection.get(), kHmacBytes, deadline, [] {});
    if (!same_code(shown, proof(session, "higher"))) return std::nullopt;
    peers[static_cast<size_t>(other)] = {std::move(connection), session};
    return other;
  } catch (const CommError&) {  // It hung up, or said nothing in time.
    return std::nullopt;
  }
}

std::vector<MetPeer> SocketMeeting::connect(
    const std::vector<std::string>& addresses, milliseconds timeout,
    const std::function<void(const std::vector<int>&)>& look) {
  timeout_ = timeout;
  const auto deadline = Clock::now() + timeout;
  const auto look_for = [&](const std::vector<int>& members) {
    if (look) look(members);
  };
  std::vector<MetPeer> peers(options_.names.size());
  for (int other = 0; other < options_.self; ++other) {
    const auto at = static_cast<size_t>(other);
    peers[at] = call(other, addresses[at], deadline, [&] { look_for({other}); });
  }
  std::vector<int> missing;
  for (int other = options_.self + 1; other < static_cast<int>(peers.size()); ++other)
    missing.push_back(other);
  while (!missing.empty()) {
    UniqueFd connection =
        accept_from(listener_.get(), std::min(kBetweenLooks, time_left(deadline)));
    if (connection) {
      if (const auto other = answer(std::move(connection), peers)) std::erase(missing, *other);
    }
    if (missing.empty()) break;
    look_for(missing);
    if (time_left(deadline).count() == 0) throw_missing(missing.front(), "it has not connected");
  }
  listener_.reset();
  return peers;
}

}  // namespace lockstep
