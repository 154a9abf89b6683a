#pragma once

#include <exception>
#include <string>

namespace lockstep {

/// What a backend's or a store's exception is about.
enum class FailureKind {
  ours,        ///< Already one of lockstep::Error.
  timeout,     ///< A wait ran into its time-out.
  connection,  ///< A connection was closed, reset or refused.
  other,       ///< A mistake in the call, a defect, ...
};

/// Looks at the type and, where the backend has none of its own, at the text: Gloo and NCCL throw
/// std::runtime_error and c10::Error for everything.
FailureKind failure_kind(const std::exception_ptr& error) noexcept;

/// The first line of an exception's text without c10's backtrace and without gloo's
/// "[.../pair.cc:534] ".
std::string failure_text(const std::exception_ptr& error);

/// True for the exceptions of a c10d store whose server is gone.
bool is_store_lost(const std::exception& error) noexcept;

}  // namespace lockstep
