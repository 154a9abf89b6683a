#include "lockstep/base/unforked_port.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "lockstep/base/socket.h"

namespace lockstep {
namespace unforked_port_test {

/// What a forked child, which starts no other program, sees of a descriptor.
bool child_has_socket(int fd) {
  const pid_t pid = fork();
  if (pid == 0) {
    int type = 0;
    socklen_t length = sizeof type;
    _exit(getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 ? 1 : 0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status) == 1;
}

TEST(UnforkedPort, KeepsItsSocketsFromForkedChildrenOnly) {
  constexpr std::chrono::seconds kPatience{20};
  const UniqueFd listener = listen_on("127.0.0.1", 0), another = listen_on("127.0.0.1", 0);
  const uint16_t port = bound_port(listener.get());
  const UniqueFd client = connect_to("127.0.0.1", port, kPatience);
  const UniqueFd server = accept_from(listener.get(), kPatience);
  ASSERT_TRUE(server);
  {
    const UnforkedPort unforked(port), again(port);
    for (const int fd : {listener.get(), client.get(), server.get()})
      EXPECT_FALSE(child_has_socket(fd)) << fd;
    EXPECT_TRUE(child_has_socket(another.get()));
  }
  EXPECT_TRUE(child_has_socket(server.get()));
  EXPECT_EQ(send(server.get(), "x", 1, MSG_NOSIGNAL), 1) << "the parent keeps it";
}

}  // namespace unforked_port_test
}  // namespace lockstep
