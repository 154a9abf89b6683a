#include "lockstep/comm/backends/hierarchical/lifeline.h"

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

constexpr char kFarewell = 'F', kLastWords = 'W';
/// As much as a connection over which nothing was sent takes at once.
constexpr size_t kMostWords = 4'000;
/// How long one who connects may take to say who it is: it says so at once.
constexpr milliseconds kHello{2'000};
/// How often one who waits for the others looks for them.
constexpr milliseconds kLookEvery{50};
/// The same while it connects. No connection takes longer, so a try is not cut short.
constexpr milliseconds kConnect{1'000};
constexpr milliseconds kTick{250};
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
struct Lifeline::Place {
  std::string address, token;
  uint16_t port = 0;

  std::string encoded() const { return std::to_string(port) + " " + token + " " + address; }
  static Place decode(const std::string& word) {
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
Lifeline::Lifeline(Options options)
    : options_(std::move(options)),
      deadline_(Clock::now() + options_.timeout),
      connections_(options_.names.size()),
      said_(options_.names.size()) {
  const UniqueFd listener = listen_on(options_.address, 0);
  const Place mine{options_.address, random_hex(kToken / 2), bound_port(listener.get())};
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

Lifeline::~Lifeline() {
  break_off({});
}

milliseconds Lifeline::left() const {
  return std::max(milliseconds(1), time_left(deadline_));
}

void Lifeline::throw_missing(int host, const std::string& why) const {
  throw TimeoutError(
      options_.names[static_cast<size_t>(host)] + " did not come within " +
          seconds_text(options_.timeout) + ": " + why,
      "did it fail before? Else the hosts must reach each other: GLOO_SOCKET_IFNAME names the "
      "network interface");
}

void Lifeline::connect_to_host(int host, const std::string& word) {
  const Place place = Place::decode(word);
  UniqueFd connection;
  while (!connection) {
    try {
      connection = connect_to(place.address, place.port, std::min(kConnect, left()));
    } catch (const TimeoutError&) {
      // It listened when it told where: it may have ended since.
      if (options_.look) options_.look({host});
      if (Clock::now() >= deadline_)
        throw_missing(host, "nothing answers from " + endpoint_text(place.address, place.port));
    } catch (const CommError& error) {
      throw_missing(host, error.what());
    }
  }
  Hello hello;
  std::copy_n(place.token.begin(), std::min(kToken, place.token.size()), hello.token.begin());
  hello.host = options_.host;
  // So few bytes fit into an empty buffer. Where the other has ended already it is found broken.
  if (send(connection.get(), &hello, sizeof(hello), MSG_NOSIGNAL) < 0)
    log_debug(std::string("greeting another host: ") + std::strerror(errno));
  connections_[static_cast<size_t>(host)].take(std::move(connection));
}

std::vector<int> Lifeline::hosts_to_accept() const {
  std::vector<int> missing;
  for (int host = options_.host + 1; host < static_cast<int>(connections_.size()); ++host)
    if (!connections_[static_cast<size_t>(host)]) missing.push_back(host);
  return missing;
}

void Lifeline::accept_hosts(int listener, const std::string& token) {
  for (auto missing = hosts_to_accept(); !missing.empty(); missing = hosts_to_accept()) {
    UniqueFd connection = accept_from(listener, std::min(kLookEvery, left()));
    if (!connection) {
      if (options_.look) options_.look(missing);
      if (Clock::now() >= deadline_) throw_missing(missing.front(), "it has not connected");
      continue;
    }
    const auto host = read_hello(connection.get(), token);
    if (!host || *host <= options_.host || *host >= static_cast<int>(connections_.size()))
      continue;  // A stranger.
    connections_[static_cast<size_t>(*host)].take(std::move(connection));
  }
}

std::optional<int> Lifeline::read_hello(int connection, const std::string& token) {
  Hello hello;
  size_t have = 0;
  const auto end = std::min(deadline_, Clock::now() + kHello);
  while (have < sizeof(hello)) {
    const auto left = time_left(end).count();
    pollfd entry{connection, POLLIN, 0};
    if (left <= 0 || poll(&entry, 1, static_cast<int>(left)) == 0) return std::nullopt;
    const ssize_t got = recv(connection, reinterpret_cast<char*>(&hello) + have,
                             sizeof(hello) - have, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return std::nullopt;
    if (got > 0) have += static_cast<size_t>(got);
  }
  if (std::string_view(hello.token.data(), kToken) != token) return std::nullopt;
  return hello.host;
}

/// Closed when it ended, in whatever way.
std::optional<Lifeline::Break> Lifeline::broken(int host) {
  auto& connection = connections_[static_cast<size_t>(host)];
  auto& said = said_[static_cast<size_t>(host)];
  std::array<char, 512> bytes{};
  ssize_t got = 0;
  // A good-bye may come without the end of the connection.
  while (!said.starts_with(kFarewell) && said.size() <= kMostWords) {
    got = recv(connection.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) said.append(bytes.data(), static_cast<size_t>(got));
    if (got == 0 || (got < 0 && errno != EINTR)) break;
  }
  if (got < 0 && errno == EAGAIN) return std::nullopt;
  const int error = errno;
  connection.reset();
  if (said.starts_with(kFarewell)) return std::nullopt;
  return Break{host, got < 0 ? std::strerror(error) : "connection closed",
               said.starts_with(kLastWords) ? said.substr(1) : std::string()};
}

std::optional<Lifeline::Break> Lifeline::broken() {
  for (int host = 0; host < static_cast<int>(connections_.size()); ++host) {
    if (!connections_[static_cast<size_t>(host)]) continue;
    if (auto found = broken(host)) return found;
  }
  return std::nullopt;
}

void Lifeline::watch(std::function<void(const Break&)> lost, std::function<void()> tick) {
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) throw SystemError("eventfd", errno);
  lost_ = std::move(lost);
  tick_ = std::move(tick);
  thread_ = std::thread([this] { run(); });
}

void Lifeline::run() {
  std::vector<pollfd> polled{{wake_.get(), POLLIN, 0}};
  for (const auto& connection : connections_) polled.push_back({connection.get(), POLLIN, 0});
  auto next_tick = Clock::now() + kTick;
  while (true) {
    const int ready = poll(polled.data(), polled.size(),
                           static_cast<int>(std::max<int64_t>(0, time_left(next_tick).count())));
    if (ready < 0 && errno != EINTR) return;
    if (ready > 0 && polled[0].revents != 0) return;
    if (ready <= 0) {
      if (Clock::now() < next_tick) continue;
      next_tick = Clock::now() + kTick;
      tick_();
      continue;
    }
    for (size_t host = 0; host < connections_.size(); ++host) {
      auto& entry = polled[host + 1];
      if (entry.fd < 0 || entry.revents == 0) continue;
      const auto found = broken(static_cast<int>(host));
      entry.fd = connections_[host].get();
      if (found) lost_(*found);
    }
  }
}

void Lifeline::close() noexcept {
  end(std::string(1, kFarewell));
}

void Lifeline::break_off(const std::string& last_words) noexcept {
  end(last_words.empty() ? std::string() : kLastWords + last_words.substr(0, kMostWords));
}

void Lifeline::end(const std::string& last) noexcept {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = write(wake_.get(), &one, sizeof(one));
    thread_.join();
  }
  for (auto& connection : connections_) {
    if (!connection) continue;
    if (!last.empty()) {
      send(connection.get(), last.data(), last.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      // What is left unread would make the system reset the connection and drop what was sent.
      std::array<char, 512> rest{};
      while (recv(connection.get(), rest.data(), rest.size(), MSG_DONTWAIT) > 0) {
      }
    }
    connection.reset();
  }
}

}  // namespace lockstep::hierarchical
