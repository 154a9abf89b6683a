#include "lockstep/base/error.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "lockstep/base/file_size_limit.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

std::string with_hint(const std::string& message, const std::string& hint) {
  return hint.empty() ? message : message + "\n  hint: " + hint;
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
    : std::runtime_error(with_hint(message, hint)) {}

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
