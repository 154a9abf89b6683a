#include "lockstep/comm/backends/hierarchical/host_links.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"

namespace lockstep::hierarchical {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// How long one who connects may take to say who it is: it says so at once.
constexpr milliseconds kHello{2'000};
/// How often one who waits for the others looks for them.
constexpr milliseconds kLookEvery{50};
/// The same while it connects. No connection takes longer, so a try is not cut short.
constexpr milliseconds kConnect{1'000};
constexpr milliseconds kTick{200};
constexpr size_t kToken = 32;

/// What one who connects says: that it belongs to the group, and who it is.
struct Hello {
  std::array<char, kToken> token{};
  int32_t host = -1;
};

std::string key_of(int host) {
  return std::to_string(host);
}

}  // namespace

/// Where a leader listens, as it tells it through the store.
struct HostLinks::Listener {
  std::string address, token;
  uint16_t port = 0;

  std::string encoded() const { return std::to_string(port) + " " + token + " " + address; }
  static Listener decode(const std::string& word) {
    const size_t first = word.find(' '), second = word.find(' ', first + 1);
    if (second == std::string::npos)
      throw CommError("the store holds no leader's address: " + word);
    return {.address = word.substr(second + 1),
            .token = word.substr(first + 1, second - first - 1),
            .port = static_cast<uint16_t>(parse_int(word.substr(0, first)).value_or(0))};
  }
};

// Nobody waits for one who waits for it: all listen before they tell where, and a connection stands
// before it is accepted.
HostLinks::HostLinks(Options options)
    : options_(std::move(options)),
      deadline_(Clock::now() + options_.timeout),
      connections_(options_.names.size()),
      received_(options_.names.size()) {
  const UniqueFd listener = listen_on(options_.address, 0);
  const Listener mine{options_.address, random_hex(kToken / 2), bound_port(listener.get())};
  options_.store->set(key_of(options_.host), mine.encoded());
  for (int host = 0; host < options_.host; ++host) {
    const std::vector<std::string> key{key_of(host)};
    try {
      options_.store->wait(key, left());
    } catch (const std::exception&) {
      if (failure_kind(std::current_exception()) != FailureKind::timeout) throw;
      throw_missing(host, "it has told no address");
    }
    connect_to_host(host, options_.store->get_to_str(key[0]));
  }
  accept_hosts(listener.get(), mine.token);
  for (const auto& connection : connections_)
    if (connection) limit_silence_of(connection.get(), options_.timeout);
}

milliseconds HostLinks::left() const {
  return std::max(milliseconds(1), time_left(deadline_));
}

void HostLinks::throw_missing(int host, const std::string& why) const {
  throw TimeoutError(
      options_.names[static_cast<size_t>(host)] + " did not come within " +
          seconds_text(options_.timeout) + ": " + why,
      "did it fail before? Else the hosts must reach each other: GLOO_SOCKET_IFNAME names the "
      "network interface");
}

void HostLinks::connect_to_host(int host, const std::string& word) {
  const Listener listener = Listener::decode(word);
  UniqueFd connection;
  while (!connection) {
    try {
      connection = connect_to(listener.address, listener.port, std::min(kConnect, left()));
    } catch (const TimeoutError&) {
      // It listened when it told where: it may have ended since.
      if (options_.look) options_.look({host});
      if (Clock::now() >= deadline_)
        throw_missing(host,
                      "nothing answers from " + endpoint_text(listener.address, listener.port));
    } catch (const CommError& error) {
      throw_missing(host, error.what());
    }
  }
  Hello hello;
  std::copy_n(listener.token.begin(), std::min(kToken, listener.token.size()), hello.token.begin());
  hello.host = options_.host;
  // So few bytes fit into an empty buffer. Where the other has ended already it is found broken.
  if (send(connection.get(), &hello, sizeof(hello), MSG_NOSIGNAL) < 0)
    log_debug(std::string("greeting another host: ") + std::strerror(errno));
  connections_[static_cast<size_t>(host)].take(std::move(connection));
}

std::vector<int> HostLinks::hosts_to_accept() const {
  std::vector<int> missing;
  for (int host = options_.host + 1; host < static_cast<int>(connections_.size()); ++host)
    if (!connections_[static_cast<size_t>(host)]) missing.push_back(host);
  return missing;
}

void HostLinks::accept_hosts(int listener, const std::string& token) {
  for (auto missing = hosts_to_accept(); !missing.empty(); missing = hosts_to_accept()) {
    UniqueFd connection = accept_from(listener, std::min(kLookEvery, left()));
    if (!connection) {
      if (options_.look) options_.look(missing);
      if (Clock::now() >= deadline_) throw_missing(missing.front(), "it has not connected");
      continue;
    }
    // It comes in one piece, right after the connection.
    Hello hello;
    pollfd entry{connection.get(), POLLIN, 0};
    poll(&entry, 1, static_cast<int>(std::min(kHello, left()).count()));
    const bool whole =
        recv(connection.get(), &hello, sizeof(hello), MSG_DONTWAIT) == ssize_t{sizeof(hello)};
    if (!whole || std::string_view(hello.token.data(), kToken) != token ||
        hello.host <= options_.host || hello.host >= static_cast<int>(connections_.size()))
      continue;  // A stranger.
    connections_[static_cast<size_t>(hello.host)].take(std::move(connection));
  }
}

void HostLinks::tell(char kind, const std::string& text) noexcept {
  const auto bytes = static_cast<uint32_t>(text.size());
  std::string word(1 + sizeof(bytes), kind);
  std::memcpy(word.data() + 1, &bytes, sizeof(bytes));
  word += text;
  const std::lock_guard lock(mutex_);
  // So few bytes fit into a connection that is otherwise empty.
  for (auto& connection : connections_)
    if (connection) send(connection.get(), word.data(), word.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void HostLinks::receive(size_t host) {
  auto& connection = connections_[host];
  std::array<char, 512> bytes{};
  ssize_t got = 0;
  while ((got = recv(connection.get(), bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0)
    received_[host].append(bytes.data(), static_cast<size_t>(got));
  const int error = got < 0 ? errno : 0;
  const bool closed = take_words(host);
  if (!closed && (error == EAGAIN || error == EINTR)) return;
  {
    const std::lock_guard lock(mutex_);
    connection.reset();
  }
  if (!closed && !closing_)
    events_.lost(static_cast<int>(host), error == 0 ? "connection closed" : std::strerror(error));
}

/// True when the other end has closed in order.
bool HostLinks::take_words(size_t host) {
  std::string& received = received_[host];
  uint32_t bytes = 0;
  constexpr size_t kHead = 1 + sizeof(bytes);
  while (received.size() >= kHead) {
    std::memcpy(&bytes, received.data() + 1, sizeof(bytes));
    if (received.size() < kHead + bytes) break;
    const char kind = received[0];
    const auto failure = decode_failure(received.substr(kHead, bytes));
    received.erase(0, kHead + bytes);
    if (kind == 'C') return true;
    if (failure) (kind == 'F' ? events_.failed : events_.left)(*failure);
  }
  return false;
}

void HostLinks::watch(Events events) {
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) throw SystemError("eventfd", errno);
  events_ = std::move(events);
  thread_ = std::thread([this] { run(); });
}

void HostLinks::run() {
  auto next_tick = Clock::now() + kTick;
  while (true) {
    std::vector<pollfd> polled{{wake_.get(), POLLIN, 0}};
    for (const auto& connection : connections_) polled.push_back({connection.get(), POLLIN, 0});
    const int ready = poll(polled.data(), polled.size(),
                           static_cast<int>(std::max<int64_t>(0, time_left(next_tick).count())));
    if ((ready < 0 && errno != EINTR) || (ready > 0 && polled[0].revents != 0)) return;
    for (size_t host = 0; ready > 0 && host < connections_.size(); ++host)
      if (polled[host + 1].revents != 0) receive(host);
    if (Clock::now() < next_tick) continue;
    next_tick = Clock::now() + kTick;
    events_.tick();
  }
}

void HostLinks::end() noexcept {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = write(wake_.get(), &one, sizeof(one));
    thread_.join();
  }
  const std::lock_guard lock(mutex_);
  for (auto& connection : connections_) {
    // What is left unread would make the system reset the connection and drop what was sent.
    std::array<char, 512> rest{};
    while (connection && recv(connection.get(), rest.data(), rest.size(), MSG_DONTWAIT) > 0) {
    }
    connection.reset();
  }
}

}  // namespace lockstep::hierarchical
