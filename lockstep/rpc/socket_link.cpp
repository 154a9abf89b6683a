#include "lockstep/rpc/socket_link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/rpc/seal.h"

namespace lockstep::rpc::detail {
namespace {

/// Read at a time. What comes meanwhile has a further turn: the others have one as well.
constexpr size_t kReadBytes = 256 << 10;
constexpr int kReadyAtOnce = 64;
/// Longer sleeps are cut: whoever sleeps looks again anyway.
constexpr std::chrono::milliseconds kLongest = std::chrono::hours(1);

int checked(int result) {
  if (result < 0) throw SystemError("rpc: making what threads sleep on", errno);
  return result;
}

/// Enters a descriptor into a set (EPOLL_CTL_ADD) or changes what is waited for (EPOLL_CTL_MOD).
int control(const UniqueFd& set, int operation, int fd, uint32_t events, int rank = 0) {
  epoll_event event{events, {}};
  event.data.u32 = static_cast<uint32_t>(rank);
  return epoll_ctl(set.get(), operation, fd, &event);
}

}  // namespace

SocketLink::SocketLink(int rank, std::vector<SocketPeer> peers, bool has_processor)
    : rank_(rank),
      has_processor_(has_processor),
      connections_(checked(epoll_create1(EPOLL_CLOEXEC))),
      bell_(checked(eventfd(1, EFD_CLOEXEC))),
      buffer_(kReadBytes) {
  for (Sleeper& sleeper : sleepers_) {
    sleeper.set.reset(checked(epoll_create1(EPOLL_CLOEXEC)));
    for (const int fd : {bell_.get(), connections_.get()})
      checked(control(sleeper.set, EPOLL_CTL_ADD, fd, 0));
  }
  for (SocketPeer& given : peers) {
    const int other = size();
    auto made = std::make_unique<Peer>();
    made->name = std::move(given.name);
    made->key_in = std::move(given.key_in);
    made->key_out = std::move(given.key_out);
    made->ended = !given.connection;
    if (given.connection) made->connection.take(std::move(given.connection));
    if (!made->ended &&
        control(connections_, EPOLL_CTL_ADD, made->connection.get(), EPOLLIN, other) != 0)
      throw SystemError("rpc: watching the connection to " + made->name, errno);
    peers_.push_back(std::move(made));
  }
}

void SocketLink::add_lookers(int more) {
  const std::lock_guard lock(sleeping_);
  lookers_ += more;
  choose();
}

void SocketLink::sleep(Waiter waiter, const std::function<bool()>& enough,
                       std::chrono::nanoseconds limit) {
  Sleeper& sleeper = sleepers_[waiter];
  const auto set_sleeps = [&](bool sleeps) {
    const std::lock_guard lock(sleeping_);
    sleeper.sleeps = sleeps;
    choose();
  };
  set_sleeps(true);
  if (!enough()) {
    const auto most =
        std::clamp<std::chrono::milliseconds>(std::chrono::ceil<std::chrono::milliseconds>(limit),
                                              std::chrono::milliseconds(0), kLongest);
    epoll_event event{};
    epoll_wait(sleeper.set.get(), &event, 1, static_cast<int>(most.count()));
  }
  set_sleeps(false);
}

// Once: that the bell was rung is forgotten when a thread has woken of it.
void SocketLink::wake(Waiter waiter) {
  const std::lock_guard lock(sleeping_);
  if (sleepers_[waiter].sleeps)
    control(sleepers_[waiter].set, EPOLL_CTL_MOD, bell_.get(), EPOLLIN | EPOLLONESHOT);
}

void SocketLink::choose() {
  std::optional<size_t> wanted;
  for (size_t i = 0; i < sleepers_.size() && lookers_ == 0 && !wanted; ++i) {
    if (sleepers_[i].sleeps) wanted = i;
  }
  if (wanted == chosen_) return;
  const auto let_wake = [&](size_t waiter, uint32_t events) {
    control(sleepers_[waiter].set, EPOLL_CTL_MOD, connections_.get(), events);
  };
  if (chosen_) let_wake(*chosen_, 0);
  if (wanted) let_wake(*wanted, EPOLLIN);
  chosen_ = wanted;
}

void SocketLink::watch(int rank, bool for_room) {
  control(connections_, EPOLL_CTL_MOD, peer(rank).connection.get(),
          EPOLLIN | (for_room ? uint32_t{EPOLLOUT} : 0U), rank);
}

bool SocketLink::send(int to, const FastHead& head, std::string_view bytes) {
  if (bytes.size() > kMostBytes) return false;
  Peer& other = peer(to);
  const std::lock_guard lock(other.mutex);
  if (other.ended || !other.unsent.empty()) return false;
  const WireHead wire{static_cast<uint32_t>(bytes.size()), head.kind, other.sent++, head.number};
  other.unsent.assign(reinterpret_cast<const char*>(&wire), sizeof(wire));
  other.unsent.append(bytes);
  if (!other.key_out.empty()) other.unsent += hmac_sha256(other.key_out, other.unsent);
  if (!flush(other)) watch(to, true);
  return true;
}

// With the peer's mutex. False: the rest waits for room. Who reads finds out why a connection
// fails.
bool SocketLink::flush(Peer& peer) {
  size_t place = 0;
  while (place < peer.unsent.size()) {
    const ssize_t sent = ::send(peer.connection.get(), peer.unsent.data() + place,
                                peer.unsent.size() - place, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      peer.unsent.erase(0, place);
      return false;
    }
    if (sent < 0) {
      shutdown(peer.connection.get(), SHUT_RDWR);  // The reader sees the end, and says it.
      break;
    }
    place += static_cast<size_t>(sent);
  }
  peer.unsent.clear();
  return true;
}

bool SocketLink::look() const {
  epoll_event event{};
  return epoll_wait(connections_.get(), &event, 1, 0) > 0;
}

void SocketLink::take(FastCatch& caught) {
  const std::unique_lock lock(taking_, std::try_to_lock);
  if (!lock) return;
  std::array<epoll_event, kReadyAtOnce> ready{};
  const int count = epoll_wait(connections_.get(), ready.data(), kReadyAtOnce, 0);
  for (int i = 0; i < count; ++i) {
    const auto& event = ready[static_cast<size_t>(i)];
    const auto other = static_cast<int>(event.data.u32);
    if ((event.events & EPOLLOUT) != 0) {
      const std::lock_guard sending(peer(other).mutex);
      if (!peer(other).ended && flush(peer(other))) watch(other, false);
    }
    if ((event.events & ~uint32_t{EPOLLOUT}) != 0) receive(other, caught);
  }
}

void SocketLink::receive(int rank, FastCatch& caught) {
  Peer& other = peer(rank);
  ssize_t got = -1;
  do {
    got = recv(other.connection.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  const int error = errno;
  if (got < 0 && (error == EAGAIN || error == EWOULDBLOCK)) return;
  if (got > 0) {
    other.in.append(buffer_.data(), static_cast<size_t>(got));
    if (take_apart(rank, caught.messages)) return;
  }
  end(rank, got == 0  ? " has ended, or has closed its connection"
            : got < 0 ? std::string(": its connection failed (") + std::strerror(error) + ")"
                      : ": its connection brought what is no message");
  caught.lost.push_back(rank);
}

// False: what has come is no message.
bool SocketLink::take_apart(int rank, std::vector<FastMessage>& messages) {
  Peer& other = peer(rank);
  const size_t code = other.key_in.empty() ? 0 : kCodeBytes;
  size_t begin = 0;
  while (other.in.size() - begin >= sizeof(WireHead)) {
    WireHead head{};
    std::memcpy(&head, other.in.data() + begin, sizeof(head));
    if (head.bytes > kMostBytes || head.count != other.received) return false;
    const size_t whole = sizeof(head) + head.bytes;
    if (other.in.size() - begin < whole + code) break;
    if (code > 0) {
      const std::string its = hmac_sha256(other.key_in, other.in.substr(begin, whole));
      if (!same_code(its, {other.in.data() + begin + whole, kCodeBytes})) return false;
    }
    messages.push_back(
        {rank, {head.kind, head.number}, other.in.substr(begin + sizeof(head), head.bytes)});
    ++other.received;
    begin += whole + code;
  }
  other.in.erase(0, begin);
  return true;
}

// The descriptor stays open, as other threads may be about to send.
void SocketLink::end(int rank, const std::string& how) {
  Peer& other = peer(rank);
  epoll_ctl(connections_.get(), EPOLL_CTL_DEL, other.connection.get(), nullptr);
  const std::lock_guard lock(other.mutex);
  other.ended = true;
  other.how = how;
  other.unsent.clear();
  other.in = {};
  shutdown(other.connection.get(), SHUT_RDWR);
}

void SocketLink::lose(int rank) {
  Peer& other = peer(rank);
  const std::lock_guard lock(other.mutex);
  if (other.ended) return;
  other.ended = true;
  other.unsent.clear();
  watch(rank, false);
}

void SocketLink::close() noexcept {
  const std::lock_guard taking(taking_);
  for (const auto& other : peers_) {
    const std::lock_guard lock(other->mutex);
    other->ended = true;
    if (!other->connection) continue;
    epoll_ctl(connections_.get(), EPOLL_CTL_DEL, other->connection.get(), nullptr);
    shutdown(other->connection.get(), SHUT_RDWR);
  }
}

std::string SocketLink::describe_end(int rank) const {
  const Peer& other = *peers_[static_cast<size_t>(rank)];
  const std::lock_guard lock(other.mutex);
  return other.name + (other.how.empty() ? " has ended, or has closed its connection" : other.how);
}

std::chrono::nanoseconds SocketLink::spin(const shm::SpinBudget& learnt) const {
  // A look is a call of the system here: without a processor of one's own there are few.
  return has_processor_ ? learnt.now() : std::chrono::nanoseconds(0);
}

}  // namespace lockstep::rpc::detail
