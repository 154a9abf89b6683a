#include "lockstep/launch/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "lockstep/base/file.h"

namespace lockstep::launch {
namespace output_test {

struct TestPipe {
  TestPipe() {
    int fds[2];
    EXPECT_EQ(::pipe2(fds, O_CLOEXEC), 0);
    read.reset(fds[0]);
    write.reset(fds[1]);
  }
  UniqueFd read;
  UniqueFd write;
};

TEST(OutputQueue, AReaderThatIsSlowBlocksNobodyAndMissesNothing) {
  TestPipe pipe;
  OutputQueue queue(pipe.write.get());
  std::string sent;
  for (int i = 0; i < 100'000; ++i) sent += std::to_string(i) + "\n";
  queue.write(sent);
  queue.pump();
  EXPECT_TRUE(queue.pending()) << "more than a pipe holds";
  std::string got;
  char buffer[8192];
  while (got.size() < sent.size()) {
    const ssize_t size = ::read(pipe.read.get(), buffer, sizeof buffer);
    ASSERT_GT(size, 0);
    got.append(buffer, static_cast<size_t>(size));
    queue.pump();
  }
  EXPECT_EQ(got, sent);
  EXPECT_FALSE(queue.pending());
}

TEST(OutputQueue, SaysWhenItIsFull) {
  TestPipe pipe;
  OutputQueue queue(pipe.write.get());
  EXPECT_FALSE(queue.full());
  queue.write(std::string(OutputQueue::kFull + 1, 'x'));
  EXPECT_TRUE(queue.full());
}

TEST(OutputQueue, AReaderThatIsGoneIsNoted) {
  std::signal(SIGPIPE, SIG_IGN);
  TestPipe pipe;
  OutputQueue queue(pipe.write.get());
  pipe.read.reset();
  queue.write("x");
  queue.pump();
  EXPECT_EQ(queue.failed_with(), EPIPE);
  queue.write("y");
  EXPECT_FALSE(queue.pending());
  std::signal(SIGPIPE, SIG_DFL);
}

TEST(OutputQueue, AFullDiskIsNoted) {
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  if (!full) GTEST_SKIP() << "no /dev/full here";
  OutputQueue queue(full.get());
  queue.write("x");
  queue.pump();
  EXPECT_EQ(queue.failed_with(), ENOSPC);
}

TEST(SameFile, TellsCopiesFromOthers) {
  TestPipe one;
  TestPipe two;
  const UniqueFd copy(::dup(one.write.get()));
  EXPECT_TRUE(same_file(one.write.get(), copy.get()));
  EXPECT_FALSE(same_file(one.write.get(), two.write.get()));
}

}  // namespace output_test
}  // namespace lockstep::launch
