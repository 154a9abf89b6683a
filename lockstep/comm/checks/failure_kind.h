#pragma once

#include <exception>
#include <string>

namespace lockstep {

/// What a backend's or a store's exception is about.
enum class FailureKind {
  ours,        ///< Already one of lockstep::Error.
  timeout,     ///< A wait ran into its time-out.
  silence,     ///< A connection was given up: its other end was silent for too long.
  connection,  ///< A connection was closed, reset or refused.
  other,       ///< A mistake in the call, a defect, ...
};

/// The peer is out of reach.
inline bool is_lost(FailureKind kind) {
  return kind == FailureKind::connection || kind == FailureKind::silence;
}

/// Looks at the type and, where that says too little, at the text.
FailureKind failure_kind(const std::exception_ptr& error) noexcept;

/// An exception's whole text without c10's backtrace.
std::string whole_text(const std::exception_ptr& error);

/// The first line of an exception's text without c10's backtrace and without gloo's
/// "[.../pair.cc:534] ".
std::string failure_text(const std::exception_ptr& error);

/// True for the exceptions of a c10d store whose server is gone.
bool is_store_lost(const std::exception& error) noexcept;

/// Any exception as one of lockstep::Error's family: ours as it is, LibTorch's as a CommError
/// without its C++ stack. Null stays null.
std::exception_ptr translate(std::exception_ptr error);

/// Runs a call into LibTorch and lets it throw only our errors.
template <class F>
auto translated(F&& call) {
  try {
    return call();
  } catch (...) {
    std::rethrow_exception(translate(std::current_exception()));
  }
}

}  // namespace lockstep
