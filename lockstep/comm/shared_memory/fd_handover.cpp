#include "lockstep/comm/shared_memory/fd_handover.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"

namespace lockstep::shm {
namespace {

using Clock = std::chrono::steady_clock;
using Served = std::function<void(int rank, const std::string& identity)>;

struct Hello {
  int32_t rank = -1;
  std::array<char, 228> identity{};
};

[[noreturn]] void throw_system(const char* what) {
  throw SystemError(std::string("shared memory: ") + what, errno);
}

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;  // A first character of 0 makes the name abstract.
  if (name.size() + 1 >= sizeof(address.sun_path))
    throw CommError("shared memory: rank 0 told a name of " + std::to_string(name.size()) +
                    " characters, which is none of ours");
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

UniqueFd make_socket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw_system("socket");
  return fd;
}

/// The user at the other end; of a connection's client the one that listens.
uid_t user_of_peer(int connection) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
    throw_system("asking for the user of another process");
  return peer.uid;
}

/// Waits until one of `sockets` can be read or `deadline` is over.
void wait_readable(std::vector<pollfd>& sockets, Clock::time_point deadline) {
  const int ready =
      poll(sockets.data(), sockets.size(), static_cast<int>(time_left(deadline).count()));
  if (ready >= 0) return;
  if (errno != EINTR) throw_system("poll");
  for (pollfd& socket : sockets) socket.revents = 0;
}

/// A byte with a descriptor.
class Parcel {
 public:
  Parcel() {
    message_.msg_iov = &data_;
    message_.msg_iovlen = 1;
    message_.msg_control = control_.data();
    message_.msg_controllen = control_.size();
  }
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;

  /// A peer that has ended meanwhile gets nothing.
  void send(int connection, int fd) {
    cmsghdr* header = CMSG_FIRSTHDR(&message_);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    sendmsg(connection, &message_, MSG_NOSIGNAL);
  }

  /// Nothing when the peer has closed the connection. Throws SystemError where the system has given
  /// this process no descriptor.
  UniqueFd receive(int connection) {
    if (recvmsg(connection, &message_, MSG_CMSG_CLOEXEC) != sizeof(byte_)) return {};
    const cmsghdr* header = CMSG_FIRSTHDR(&message_);
    if (!header && (message_.msg_flags & MSG_CTRUNC) != 0) {
      errno = EMFILE;
      throw_system("receiving it from rank 0");
    }
    if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) return {};
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    return UniqueFd(fd);
  }

 private:
  char byte_ = 0;
  iovec data_{&byte_, sizeof(byte_)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control_{};
  msghdr message_{};
};

/// Rank 0's side: who has connected, and who is still to come.
class Counter {
 public:
  Counter(int fd, int size, const Served& served)
      : fd_(fd), served_(served), missing_(static_cast<size_t>(size - 1)) {
    std::iota(missing_.begin(), missing_.end(), 1);
  }

  std::string listen() {
    std::string name = "lockstep-" + random_hex(16) + "-" + std::to_string(getpid());
    const auto [address, length] = abstract_address(name);
    if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        ::listen(listener_.get(), SOMAXCONN) != 0)
      throw_system("listening for the other ranks");
    return name;
  }

  const std::vector<int>& missing() const { return missing_; }

  /// Serves who comes until `deadline`, or who has come.
  void serve(Clock::time_point deadline) {
    std::vector<pollfd> sockets = {{listener_.get(), POLLIN, 0}};
    for (const Client& client : clients_) sockets.push_back({client.connection.get(), POLLIN, 0});
    wait_readable(sockets, deadline);
    for (size_t i = 0; i < clients_.size(); ++i) {
      if (sockets[i + 1].revents != 0) answer(clients_[i]);
    }
    const auto now = Clock::now();
    std::erase_if(clients_, [&](const Client& client) {
      return !client.connection || now >= client.patience_ends;
    });
    if (sockets[0].revents != 0) admit();
  }

 private:
  /// A process of this user that has not yet said which rank it is.
  struct Client {
    UniqueFd connection;
    Clock::time_point patience_ends;
  };
  /// A rank says it right after it has connected.
  static constexpr std::chrono::seconds kPatience{2};

  void admit() {
    UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection) {
      if (user_of_peer(connection.get()) == geteuid())
        clients_.push_back({std::move(connection), Clock::now() + kPatience});
    } else if (errno != EINTR && errno != ECONNABORTED) {
      throw_system("accepting the connection of another rank");
    }
  }

  void answer(Client& client) {
    const UniqueFd connection = std::move(client.connection);
    Hello hello;
    if (recv(connection.get(), &hello, sizeof(hello), MSG_DONTWAIT) != sizeof(hello)) return;
    const auto place = std::find(missing_.begin(), missing_.end(), hello.rank);
    if (place == missing_.end()) return;
    hello.identity.back() = '\0';
    served_(hello.rank, hello.identity.data());
    Parcel().send(connection.get(), fd_);
    missing_.erase(place);
  }

  const int fd_;
  const Served& served_;
  const UniqueFd listener_ = make_socket();
  std::vector<Client> clients_;
  std::vector<int> missing_;
};

/// The other side: what it says, and to whom.
Hello hello_of(int rank) {
  Hello hello;
  hello.rank = rank;
  const std::string identity = process_identity();
  std::memcpy(hello.identity.data(), identity.data(),
              std::min(identity.size(), hello.identity.size() - 1));
  return hello;
}

/// The name ends in rank 0's process.
UniqueFd connect_to(const std::string& name, const std::string& what) {
  UniqueFd connection = make_socket();
  const auto [address, length] = abstract_address(name);
  if (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0)
    return connection;
  const std::string reason = std::strerror(errno);
  const std::string process = name.substr(name.rfind('-') + 1);
  throw PeerLostError(
      what + "rank 0 (process " + process + ") has ended, or cannot be reached [" + reason + "]",
      "look at what rank 0 printed last. Where the ranks are in containers with network namespaces "
      "of their own, share the host's (docker run --network host), or use the backend gloo");
}

void check_user(int connection, int rank, const std::string& what) {
  const uid_t user = user_of_peer(connection);
  if (user == geteuid()) return;
  throw UsageError(what + "rank 0 runs as user " + std::to_string(user) + ", rank " +
                       std::to_string(rank) + " as user " + std::to_string(geteuid()),
                   "start all ranks of a host as one user, or use the backend gloo");
}

}  // namespace

void hand_out(int fd, int size, std::chrono::milliseconds timeout, const std::string& group,
              const std::function<void(const std::string& name)>& tell, const Served& served,
              const std::function<void(const std::vector<int>& missing)>& look) {
  constexpr std::chrono::milliseconds kSlice{20};
  const auto deadline = Clock::now() + timeout;
  Counter counter(fd, size, served);
  tell(counter.listen());
  for (auto next_look = Clock::now() + kSlice; !counter.missing().empty();) {
    counter.serve(std::min(deadline, next_look));
    const auto now = Clock::now();
    if (now < next_look && now < deadline) continue;
    next_look = now + kSlice;
    if (counter.missing().empty()) return;
    if (look) look(counter.missing());
    if (now < deadline) continue;
    throw TimeoutError("shared memory of group '" + group + "': " + ranks_text(counter.missing()) +
                       " did not come within " + seconds_text(timeout));
  }
}

UniqueFd receive(const std::string& name, int rank, std::chrono::milliseconds timeout,
                 const std::string& group) {
  const auto deadline = Clock::now() + timeout;
  const std::string what = "shared memory of group '" + group + "': ";
  const Hello hello = hello_of(rank);
  // Rank 0 also closes when it has waited too long for the hello: once more finds out.
  for (int tries = 0; tries < 2; ++tries) {
    const UniqueFd connection = connect_to(name, what);
    check_user(connection.get(), rank, what);
    send(connection.get(), &hello, sizeof(hello), MSG_NOSIGNAL);
    std::vector<pollfd> sockets = {{connection.get(), POLLIN, 0}};
    while (sockets[0].revents == 0) {
      if (Clock::now() >= deadline)
        throw TimeoutError(what + "rank 0 gave no answer within " + seconds_text(timeout));
      wait_readable(sockets, deadline);
    }
    if (UniqueFd fd = Parcel().receive(connection.get())) return fd;
  }
  throw CommError(what + "rank 0 closed the connection", "look at what rank 0 printed last");
}

}  // namespace lockstep::shm
