#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <stdexcept>

#include "lockstep/base/file.h"

namespace lockstep::test_process {

/// For tests: a process beside this one that does what it is told and then stays until it is
/// killed. It is a fork, so it may use no thread of its parent's (LibTorch's pool among them).
class OtherProcess {
 public:
  /// Returns when `work` has called what it is given.
  explicit OtherProcess(const std::function<void(const std::function<void()>& ready)>& work) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe");
    const UniqueFd reading(ends[0]);
    UniqueFd writing(ends[1]);
    process_ = ::fork();
    if (process_ == 0) run(work, writing.get());
    writing.reset();
    char byte = 0;
    if (::read(reading.get(), &byte, 1) == 1) return;
    kill();
    throw std::runtime_error("the other process failed");
  }
  ~OtherProcess() { kill(); }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  pid_t process() const { return process_; }
  void kill() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = -1;
  }

 private:
  [[noreturn]] static void run(const std::function<void(const std::function<void()>&)>& work,
                               int told) {
    try {
      work([told] {
        const char byte = 1;
        if (::write(told, &byte, 1) != 1) ::_exit(1);
        while (true) ::pause();
      });
    } catch (const std::exception&) {
    }
    ::_exit(1);
  }

  pid_t process_ = -1;
};

}  // namespace lockstep::test_process
