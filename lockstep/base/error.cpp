#include "lockstep/base/error.h"

#include <csignal>
#include <cstring>

namespace lockstep {
namespace {

std::string with_hint(const std::string& message, const std::string& hint) {
  return hint.empty() ? message : message + "\n  hint: " + hint;
}

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? std::string("SIG") + name : "signal " + std::to_string(number);
}

}  // namespace

Error::Error(const std::string& message, const std::string& hint)
    : std::runtime_error(with_hint(message, hint)) {}

SystemError::SystemError(const std::string& message, int errno_value, const std::string& hint)
    : Error(message + ": " + std::strerror(errno_value), hint), errno_value_(errno_value) {}

InterruptedError::InterruptedError(int signal_number)
    : Error("stopped by " + signal_name(signal_number)), signal_number_(signal_number) {}

int exit_code_of(const std::exception& error) noexcept {
  const auto* ours = dynamic_cast<const Error*>(&error);
  return ours ? ours->exit_code() : kExitFailure;
}

}  // namespace lockstep
