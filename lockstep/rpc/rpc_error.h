#pragma once

#include <string>

#include "lockstep/base/error.h"

namespace lockstep::rpc {

/// A function failed on the worker that ran it. `what()` says which function, where, and the
/// exception's type and message.
class RemoteError : public Error {
 public:
  RemoteError(std::string worker, std::string function, std::string type, std::string message);

  /// The worker on which the exception was thrown. Of nested calls this is the last worker, and so
  /// are the type and the message.
  const std::string& worker() const noexcept { return worker_; }
  const std::string& function() const noexcept { return function_; }
  /// The exception's C++ type: "std::out_of_range", "lockstep::UsageError".
  const std::string& type() const noexcept { return type_; }
  /// The exception's own `what()`.
  const std::string& message() const noexcept { return message_; }

 private:
  std::string worker_, function_, type_, message_;
};

/// The call was given up by `Future::cancel`.
class CancelledError : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep::rpc
