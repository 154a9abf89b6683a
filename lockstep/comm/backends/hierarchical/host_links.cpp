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
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/socket_meeting.h"
#include "lockstep/base/text.h"

namespace lockstep::hierarchical {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kTick{200};
/// The key in the store of what the leaders alone know.
constexpr const char* kSecret = "secret";
constexpr const char* kReachEachOther =
    "did it fail before? Else the hosts must reach each other: GLOO_SOCKET_IFNAME names the "
    "network "
    "interface";

}  // namespace

// Nobody waits for one who waits for it: all listen before they tell where, and a connection stands
// before it is accepted.
HostLinks::HostLinks(Options options)
    : options_(std::move(options)),
      connections_(options_.names.size()),
      received_(options_.names.size()) {
  const auto told = [&](const std::string& key) {
    options_.store->wait({key}, options_.timeout);
    return options_.store->get_to_str(key);
  };
  if (options_.host == 0) options_.store->set(kSecret, random_hex(16));
  SocketMeeting meeting({.self = options_.host,
                         .names = options_.names,
                         .key = told(kSecret),
                         .hint = kReachEachOther});
  options_.store->set(std::to_string(options_.host), meeting.listen(options_.address));
  std::vector<std::string> addresses;
  for (int host = 0; host < options_.host; ++host) addresses.push_back(told(std::to_string(host)));
  auto peers = meeting.connect(addresses, options_.timeout, options_.look);
  for (size_t host = 0; host < peers.size(); ++host) {
    if (!peers[host].connection) continue;
    connections_[host].take(std::move(peers[host].connection));
    limit_silence_of(connections_[host].get(), options_.timeout);
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
