#include "lockstep/base/process_identity.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <string>
#include <thread>

namespace lockstep {
namespace process_identity_test {

/// A process that says who it is and waits to be ended. Runs nothing of LibTorch's after the fork.
class Child {
 public:
  Child() {
    std::array<int, 2> out{};
    std::array<int, 2> hold{};
    EXPECT_EQ(pipe(out.data()), 0);
    EXPECT_EQ(pipe(hold.data()), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(hold[1]);
      const std::string identity = process_identity();
      if (write(out[1], identity.data(), identity.size()) < 0) _exit(1);
      close(out[1]);
      char byte = 0;
      if (read(hold[0], &byte, 1) < 0) _exit(1);
      _exit(0);
    }
    close(out[1]);
    close(hold[0]);
    hold_ = hold[1];
    std::array<char, 256> text{};
    for (ssize_t n = 0; (n = read(out[0], text.data(), text.size())) > 0;)
      identity_.append(text.data(), static_cast<size_t>(n));
    close(out[0]);
  }
  ~Child() {
    release();
    reap();
  }
  void release() {
    if (hold_ >= 0) close(hold_);
    hold_ = -1;
  }
  /// Waits until the child has ended but leaves it to be reaped.
  void wait_for_end() {
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }
  void reap() {
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  const std::string& identity() const { return identity_; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int hold_ = -1;
  std::string identity_;
};

TEST(ProcessIdentity, OfThisProcess) {
  EXPECT_EQ(process_state(process_identity()), ProcessState::alive);
  EXPECT_EQ(process_number(process_identity()), getpid());
}

TEST(ProcessIdentity, AliveThenEndedBeforeAndAfterItIsReaped) {
  Child child;
  EXPECT_EQ(process_number(child.identity()), child.pid());
  EXPECT_EQ(process_state(child.identity()), ProcessState::alive);
  child.release();
  child.wait_for_end();
  EXPECT_EQ(process_state(child.identity()), ProcessState::ended);
  child.reap();
  EXPECT_EQ(process_state(child.identity()), ProcessState::ended);
}

bool main_thread_has_ended() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  return line.find(") Z ") != std::string::npos;
}

/// Its main thread has ended, which shows as a zombie, while another one still runs.
TEST(ProcessIdentity, AliveWithoutItsMainThreadAsLongAsAnotherRuns) {
  std::array<int, 2> out{}, hold{};
  ASSERT_EQ(pipe(out.data()), 0);
  ASSERT_EQ(pipe(hold.data()), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    close(hold[1]);
    std::thread([=] {
      while (!main_thread_has_ended()) std::this_thread::yield();
      const std::string identity = process_identity();
      char byte = 0;
      const bool told = write(out[1], identity.data(), identity.size()) > 0;
      _exit(told && read(hold[0], &byte, 1) == 0 ? 0 : 1);
    }).detach();
    syscall(SYS_exit, 0);  // As pthread_exit, which would unwind GoogleTest's frames.
  }
  for (const int fd : {out[1], hold[0]}) close(fd);
  std::array<char, 256> text{};
  const ssize_t length = read(out[0], text.data(), text.size());
  ASSERT_GT(length, 0);
  const std::string identity(text.data(), static_cast<size_t>(length));
  EXPECT_EQ(process_number(identity), pid);
  EXPECT_EQ(process_state(identity), ProcessState::alive);
  for (const int fd : {out[0], hold[1]}) close(fd);
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);
  EXPECT_EQ(process_state(identity), ProcessState::ended);
  waitpid(pid, nullptr, 0);
}

TEST(ProcessIdentity, NumberUsedAgainByAnother) {
  std::string identity = process_identity();
  identity.back() = identity.back() == '1' ? '2' : '1';  // Another start time.
  EXPECT_EQ(process_state(identity), ProcessState::ended);
}

TEST(ProcessIdentity, OtherHostOrGarbageIsUnknown) {
  EXPECT_EQ(process_state("otherboot,pid:[1] 1 1"), ProcessState::unknown);
  EXPECT_EQ(process_state(""), ProcessState::unknown);
  EXPECT_EQ(process_state("garbage"), ProcessState::unknown);
  EXPECT_EQ(process_number("garbage"), -1);
}

}  // namespace process_identity_test
}  // namespace lockstep
