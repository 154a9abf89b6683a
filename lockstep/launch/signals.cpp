#include "lockstep/launch/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

// A handler gets nothing but the number, so where to put it cannot but be global.
std::atomic<int> handler_fd{-1};

void handle(int signal) {
  const int before = errno;
  const auto byte = static_cast<unsigned char>(signal);
  [[maybe_unused]] const auto written = ::write(handler_fd.load(), &byte, 1);
  errno = before;
}

bool stays_ignored(int signal) {
  return std::find(std::begin(kStayIgnored), std::end(kStayIgnored), signal) !=
         std::end(kStayIgnored);
}

}  // namespace

SignalCatcher::SignalCatcher(const std::vector<int>& signals) {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC | O_NONBLOCK) != 0) throw SystemError("cannot make a pipe", errno);
  read_.reset(fds[0]);
  write_.reset(fds[1]);
  int expected = -1;
  if (!handler_fd.compare_exchange_strong(expected, write_.get())) {
    throw Error("this process is already waiting for workers in another thread",
                "one spawn at a time");
  }
  auto install = [this](int signal, void (*handler)(int)) {
    struct sigaction action {};
    struct sigaction before {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN && stays_ignored(signal)) return;
    sigaction(signal, &action, nullptr);
    before_.emplace_back(signal, before);
  };
  for (const int signal : signals) install(signal, handle);
  install(SIGPIPE, SIG_IGN);
  unblocked_.emplace(signals);
}

SignalCatcher::~SignalCatcher() {
  unblocked_.reset();
  for (auto it = before_.rbegin(); it != before_.rend(); ++it) {
    sigaction(it->first, &it->second, nullptr);
  }
  handler_fd = -1;
}

std::optional<int> SignalCatcher::next() {
  unsigned char byte = 0;
  ssize_t size = 0;
  do {
    size = ::read(read_.get(), &byte, 1);
  } while (size < 0 && errno == EINTR);
  return size == 1 ? std::optional<int>(byte) : std::nullopt;
}

}  // namespace lockstep::launch
