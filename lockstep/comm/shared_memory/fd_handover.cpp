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

constexpr uint32_t kNobody = UINT32_MAX;
struct Hello {
  int32_t rank = -1;
  std::array<char, 228> identity{};
};

struct Answer {
  uint32_t uid = kNobody;  ///< Of rank 0.
  uint32_t granted = 0;
};

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
  if (!fd) throw SystemError("shared memory: socket", errno);
  return fd;
}

/// Waits until there is something to read; false when the time is over.
bool readable(int fd, Clock::time_point deadline) {
  while (true) {
    pollfd one{fd, POLLIN, 0};
    const int ready = poll(&one, 1, static_cast<int>(time_left(deadline).count()));
    if (ready > 0) return true;
    if (ready == 0) return false;
    if (errno != EINTR) throw SystemError("shared memory: poll", errno);
  }
}

void send_answer(int connection, const Answer& answer, int fd) {
  iovec data{const_cast<Answer*>(&answer), sizeof(answer)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (answer.granted) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  }
  sendmsg(connection, &message,
          MSG_NOSIGNAL);  // A client that has ended meanwhile is missed later.
}

using Served = std::function<void(int rank, const std::string& identity)>;

/// Serves one connection; the rank that now has the descriptor, or -1.
int serve(int listener, int fd, int size, const Served& served) {
  const UniqueFd connection(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!connection) return -1;
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return -1;
  const bool same = peer.uid == geteuid();
  Hello hello;
  // A rank sends its number right after it has connected; a stranger may hold up nobody for long.
  constexpr std::chrono::seconds kHello{2};
  if (!readable(connection.get(), Clock::now() + kHello) ||
      recv(connection.get(), &hello, sizeof(hello), 0) != sizeof(hello) || hello.rank < 1 ||
      hello.rank >= size)
    return -1;
  hello.identity.back() = '\0';
  if (same) served(hello.rank, hello.identity.data());
  send_answer(connection.get(), {geteuid(), same ? 1U : 0U}, fd);
  return same ? hello.rank : -1;
}

UniqueFd receive_answer(int connection, Answer& answer) {
  iovec data{&answer, sizeof(answer)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != sizeof(answer)) return {};
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (!header || header->cmsg_type != SCM_RIGHTS) return {};
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
  return UniqueFd(fd);
}

}  // namespace

void hand_out(int fd, int size, std::chrono::milliseconds timeout, const std::string& group,
              const std::function<void(const std::string& name)>& tell, const Served& served,
              const std::function<void(const std::vector<int>& missing)>& look) {
  constexpr std::chrono::milliseconds kSlice{20};
  const auto deadline = Clock::now() + timeout;
  const UniqueFd listener = make_socket();
  const std::string name = "lockstep-" + random_hex(16);
  const auto [address, length] = abstract_address(name);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0)
    throw SystemError("shared memory: listening for the other ranks", errno);
  tell(name);
  std::vector<int> missing(static_cast<size_t>(size - 1));
  std::iota(missing.begin(), missing.end(), 1);
  while (!missing.empty()) {
    if (readable(listener.get(), std::min(deadline, Clock::now() + kSlice))) {
      std::erase(missing, serve(listener.get(), fd, size, served));
      continue;
    }
    if (look) look(missing);
    if (Clock::now() < deadline) continue;
    throw TimeoutError("shared memory of group '" + group + "': " + ranks_text(missing) +
                       " did not come");
  }
}

UniqueFd receive(const std::string& name, int rank, std::chrono::milliseconds timeout,
                 const std::string& group) {
  const auto deadline = Clock::now() + timeout;
  const std::string what = "shared memory of group '" + group + "': ";
  const UniqueFd connection = make_socket();
  const auto [address, length] = abstract_address(name);
  if (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
    throw CommError(what + "rank 0 cannot be reached [" + std::strerror(errno) + "]",
                    "it has ended, or the ranks are in containers with network namespaces of their "
                    "own: share the host's (docker run --network host), or use --backend gloo");
  Hello hello;
  hello.rank = rank;
  const std::string identity = process_identity();
  std::memcpy(hello.identity.data(), identity.data(),
              std::min(identity.size(), hello.identity.size() - 1));
  const bool sent = send(connection.get(), &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello);
  if (!sent || !readable(connection.get(), deadline))
    throw TimeoutError(what + "rank 0 gave no answer");
  Answer answer;
  UniqueFd fd = receive_answer(connection.get(), answer);
  if (fd) return fd;
  if (answer.uid != kNobody && answer.granted == 0)
    throw UsageError(what + "rank 0 runs as user " + std::to_string(answer.uid) + ", rank " +
                         std::to_string(rank) + " as user " + std::to_string(geteuid()),
                     "start all ranks of a host as one user, or use --backend gloo");
  throw CommError(what + "rank 0 closed the connection", "look at what rank 0 printed last");
}

}  // namespace lockstep::shm
