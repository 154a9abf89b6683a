#include "lockstep/tool/memory_limit.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>

#include "lockstep/base/text.h"

namespace lockstep::tool {
namespace {

/// What the signal's handler writes. Empty: no AbortMeansMemory lives.
std::string& abort_text() {
  static std::string text;
  return text;
}

void write_and_end(int /*signal*/) {
  const std::string& text = abort_text();
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  ::_exit(1);
}

rlim_t addresses_allowed() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_AS, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

}  // namespace

bool memory_is_limited() {
  return addresses_allowed() != RLIM_INFINITY;
}

std::string memory_limit_hint() {
  if (!memory_is_limited()) return {};
  return "\n  hint: a memory limit holds: `ulimit -v` allows each process " +
         human_bytes(addresses_allowed()) +
         " of addresses, of which LibTorch alone takes half a GB. Raise it (ulimit -v unlimited)";
}

AbortMeansMemory::AbortMeansMemory(const std::string& message) {
  const std::string hint = memory_limit_hint();
  if (hint.empty()) return;
  abort_text() = message + hint + "\n";
  std::signal(SIGABRT, write_and_end);
}

AbortMeansMemory::~AbortMeansMemory() {
  if (abort_text().empty()) return;
  std::signal(SIGABRT, SIG_DFL);
  abort_text().clear();
}

}  // namespace lockstep::tool
