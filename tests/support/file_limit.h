#pragma once

// For tests: a process that runs out of file descriptors, and what a forked one throws.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <string>

#include "lockstep/base/file.h"
#include "tests/support/run_ranks.h"

namespace lockstep::test {

/// While it lives this process can open `more` files or sockets.
class FileLimit {
 public:
  explicit FileLimit(unsigned more) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const UniqueFd lowest_free(dup(0));
    rlimit lowered = before_;
    lowered.rlim_cur = static_cast<rlim_t>(lowest_free.get()) + more;
    setrlimit(RLIMIT_NOFILE, &lowered);
  }
  ~FileLimit() { setrlimit(RLIMIT_NOFILE, &before_); }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  rlimit before_{};
};

/// The text of what `body` throws in a forked process; empty when it throws nothing. Of this
/// process only the calling thread goes on there, so that nothing of LibTorch may run.
template <class Body>
std::string in_child(Body body) {
  std::array<int, 2> out{};
  EXPECT_EQ(pipe(out.data()), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const std::string text = outcome_of(body).text();
    const ssize_t written = write(out[1], text.data(), text.size());
    _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(out[1]);
  std::string text;
  std::array<char, 1024> part{};
  for (ssize_t n = 0; (n = read(out[0], part.data(), part.size())) > 0;)
    text.append(part.data(), static_cast<size_t>(n));
  close(out[0]);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return text;
}

}  // namespace lockstep::test
