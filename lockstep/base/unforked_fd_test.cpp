#include "lockstep/base/unforked_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/file.h"

namespace lockstep {
namespace unforked_fd_test {

/// What `look` returns in a forked child that starts no other program.
template <class Look>
int in_child(Look look) {
  const pid_t pid = fork();
  if (pid == 0) _exit(look());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

TEST(UnforkedFd, IsClosedInAForkedChildOnly) {
  UnforkedFd fd;
  EXPECT_FALSE(fd);
  ASSERT_TRUE(fd.open("/dev/zero", O_RDONLY));
  const int number = fd.get();
  EXPECT_EQ(in_child([&] { return fcntl(number, F_GETFD) < 0 && errno == EBADF && !fd; }), 1);
  char byte = 1;
  EXPECT_EQ(read(fd.get(), &byte, 1), 1) << "the parent keeps it";
}

TEST(UnforkedFd, OneThatIsGoneClosesNothingInTheChild) {
  int number = -1;
  {
    UnforkedFd fd;
    ASSERT_TRUE(fd.open("/dev/zero", O_RDONLY));
    number = fd.get();
  }
  EXPECT_LT(fcntl(number, F_GETFD), 0);
  const UniqueFd other(open("/dev/null", O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(other.get(), number) << "the number is used again";
  EXPECT_EQ(in_child([&] { return fcntl(number, F_GETFD) >= 0; }), 1);
}

TEST(UnforkedFd, OneThatWasTakenOverIsClosedInAForkedChildOnly) {
  UnforkedFd fd;
  fd.take(UniqueFd(open("/dev/zero", O_RDONLY | O_CLOEXEC)));
  const int number = fd.get();
  EXPECT_EQ(in_child([&] { return fcntl(number, F_GETFD) < 0 && !fd; }), 1);
  EXPECT_GE(fcntl(number, F_GETFD), 0);
  fd.reset();
  EXPECT_LT(fcntl(number, F_GETFD), 0);
}

TEST(UnforkedFd, TellsWhyItCannotBeOpened) {
  UnforkedFd fd;
  EXPECT_FALSE(fd.open("/no/such/file", O_RDONLY));
  EXPECT_EQ(errno, ENOENT);
  EXPECT_FALSE(fd);
}

}  // namespace unforked_fd_test
}  // namespace lockstep
