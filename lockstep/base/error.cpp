#include "lockstep/base/error.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "lockstep/base/env.h"
#include "lockstep/base/file_size_limit.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

std::string with_hint(const std::string& message, const std::string& hint) {
  return hint.empty() ? message : message + "\n  hint: " + hint;
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free);
  return text ? text.get() : name;
}

/// The calls that led here, from the caller of an Error's constructor on, as addr2line takes them.
/// Functions of a program have names here only where it exports them.
std::string backtrace_text() {
  constexpr int kFirst = 2, kMost = 64;
  void* frames[kMost];
  const int count = ::backtrace(frames, kMost);
  std::string text = "\n  backtrace:";
  for (int i = kFirst; i < count; ++i) {
    // An address to return to may lie in the next line.
    const char* const address = static_cast<const char*>(frames[i]) - 1;
    Dl_info info{};
    if (::dladdr(address, &info) == 0) continue;
    char offset[32];
    std::snprintf(offset, sizeof offset, " 0x%tx", address - static_cast<char*>(info.dli_fbase));
    text += std::string("\n    ") + info.dli_fname + offset;
    if (info.dli_sname) text += " " + demangled(info.dli_sname);
  }
  return text;
}

/// What std::runtime_error keeps. PyTorch's variable, which LibTorch's own errors need in Python
/// only.
std::string what_of(const std::string& message, const std::string& hint) {
  const bool shown = env_string("TORCH_SHOW_CPP_STACKTRACES") == "1";
  return with_hint(message, hint) + (shown ? backtrace_text() : "");
}

/// What to do about an error that the call itself says nothing about.
std::string hint_of(int errno_value) {
  const auto most = file_size_limit();
  if (errno_value == EFBIG && most) {
    return "`ulimit -f` allows this process files and shared memory of " + human_bytes(*most) +
           "; raise it";
  }
  rlimit limit{};
  if (errno_value != EMFILE || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
  return "`ulimit -n` allows this process " + std::to_string(limit.rlim_cur) +
         " open files and sockets; raise it";
}

/// The message's first line ends in "(timed out)" where no line says it.
std::string with_timed_out(const std::string& message) {
  for (const char* word : {"timed out", "timeout"})
    if (message.find(word) != std::string::npos) return message;
  std::string text = message;
  return text.insert(std::min(text.find('\n'), text.size()), " (timed out)");
}

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? std::string("SIG") + name : "signal " + std::to_string(number);
}

}  // namespace

Error::Error(const std::string& message, const std::string& hint)
    : std::runtime_error(what_of(message, hint)) {}

SystemError::SystemError(const std::string& message, int errno_value, const std::string& hint)
    : Error(message + ": " + std::strerror(errno_value),
            hint.empty() ? hint_of(errno_value) : hint),
      errno_value_(errno_value) {}

CommError::CommError(const std::string& message, const std::string& hint, Failure failure)
    : Error(message, hint), failure_(std::make_shared<const Failure>(std::move(failure))) {}

std::vector<int> CommError::ranks() const {
  std::vector<int> numbers;
  for (const auto& rank : failure_->ranks) numbers.push_back(rank.number);
  return numbers;
}

TimeoutError::TimeoutError(const std::string& message, const std::string& hint, Failure failure)
    : CommError(with_timed_out(message), hint, std::move(failure)) {}

void throw_late(const std::string& what, const std::vector<int>& ranks,
                std::chrono::milliseconds timeout, const std::string& hint) {
  Failure failure{.kind = Failure::Kind::late, .waited_ms = timeout.count()};
  for (const int rank : ranks) failure.ranks.push_back({rank, failure.kind});
  throw TimeoutError(what + ranks_text(ranks) + " did not come within " +
                         human_seconds(static_cast<double>(timeout.count()) / 1000),
                     hint, failure);
}

PeerLeftError::PeerLeftError(const std::string& message, Failure failure)
    : PeerLostError(message,
                    "all ranks must make the same number of steps: all-reduce the criterion by "
                    "which the loop ends. Where it has the same length, the last calls may have "
                    "differed: LOCKSTEP_DEBUG=detail compares every call. If the rank that left "
                    "printed an error, look at that",
                    std::move(failure)) {}

std::exception_ptr failure_error(const std::string& message, const Failure& failure) {
  if (failure.timed_out())
    return std::make_exception_ptr(TimeoutError(
        message, "do all ranks make the same calls? Else give a longer time-out", failure));
  if (failure.has(Failure::Kind::left))
    return std::make_exception_ptr(PeerLeftError(message, failure));
  return std::make_exception_ptr(PeerLostError(message, kPeerLostHint, failure));
}

void throw_failure(const std::string& what, const Failure& failure) {
  std::rethrow_exception(failure_error(what + describe(failure), failure));
}

InterruptedError::InterruptedError(int signal_number)
    : Error("stopped by " + signal_name(signal_number)), signal_number_(signal_number) {}

int exit_code_of(const std::exception& error) noexcept {
  const auto* ours = dynamic_cast<const Error*>(&error);
  return ours ? ours->exit_code() : kExitFailure;
}

}  // namespace lockstep
