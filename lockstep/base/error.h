#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/failure.h"

namespace lockstep {

/// Exit codes of our programs. A program that a signal ends exits with 128 + its number.
inline constexpr int kExitSuccess = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

/// The root of every exception that Lockstep throws.
///
/// `what()` says what happened, where (rank, file, operation) and what was expected. Where the user
/// can do something about it, a second line says what: "  hint: ...".
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, const std::string& hint = {});
  /// The exit code of a program that this error ends.
  virtual int exit_code() const noexcept { return kExitFailure; }
};

/// A mistake of the caller: in a flag, an option, an argument, a configuration file or the
/// environment.
class UsageError : public Error {
 public:
  using Error::Error;
  int exit_code() const noexcept override { return kExitUsage; }
};

/// A file or data that is missing, truncated, damaged, or of another format or kind than expected.
class DataError : public Error {
 public:
  using Error::Error;
};

/// A checkpoint that cannot be written, read or applied.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// The operating system refused something: a full disk, a missing permission, no such folder.
/// The message ends in strerror's text.
class SystemError : public Error {
 public:
  SystemError(const std::string& message, int errno_value, const std::string& hint = {});
  int errno_value() const noexcept { return errno_value_; }

 private:
  int errno_value_;
};

/// Anything that goes wrong between ranks. It carries what is known of it as data.
class CommError : public Error {
 public:
  explicit CommError(const std::string& message, const std::string& hint = {},
                     Failure failure = {});
  /// The failure as data, as far as it is known.
  const Failure& failure() const noexcept { return *failure_; }
  /// The ranks that it concerns, by their numbers in the default group.
  std::vector<int> ranks() const;

 private:
  std::shared_ptr<const Failure> failure_;
};

/// A wait between ranks ran into its time-out. `what()` contains "timed out" or "timeout", by which
/// code written for PyTorch tells such an error.
class TimeoutError : public CommError {
 public:
  explicit TimeoutError(const std::string& message, const std::string& hint = {},
                        Failure failure = {.kind = Failure::Kind::late});
};

/// Throws the TimeoutError of ranks, by their numbers in the default group, that did not come
/// within the time-out. The message begins with `what`.
[[noreturn]] void throw_late(const std::string& what, const std::vector<int>& ranks,
                             std::chrono::milliseconds timeout, const std::string& hint = {});

/// The hint of a PeerLostError that has no better one. The launcher looks for it in what a program
/// printed that caught the error itself, and so wrote no error file.
inline constexpr const char* kPeerLostHint =
    "look at what the lost rank printed last; it is the cause";

/// A peer died, closed the group, or its connection was lost.
class PeerLostError : public CommError {
 public:
  explicit PeerLostError(const std::string& message, const std::string& hint = kPeerLostHint,
                         Failure failure = {.kind = Failure::Kind::unreachable})
      : CommError(message, hint, std::move(failure)) {}
};

/// A peer closed the group without a failure while this rank still calls: their loops are not of
/// the same length. No peer failed, so the mistake is the program's.
class PeerLeftError : public PeerLostError {
 public:
  PeerLeftError(const std::string& message, Failure failure);
};

/// Two ranks called different collectives, or the same one with other shapes, dtypes or options.
class MismatchError : public CommError {
 public:
  explicit MismatchError(const std::string& message, const std::string& hint = {},
                         Failure failure = {.kind = Failure::Kind::mismatch})
      : CommError(message, hint, std::move(failure)) {}
};

/// The error of a failure, in these words: a TimeoutError where ranks were late, a PeerLeftError
/// where one has left after its loop, else a PeerLostError.
std::exception_ptr failure_error(const std::string& message, const Failure& failure);
/// Throws failure_error with a message of `what` was done and the failure's description.
[[noreturn]] void throw_failure(const std::string& what, const Failure& failure);

/// A loss or gradient that is NaN or infinite.
class NumericError : public Error {
 public:
  using Error::Error;
};

/// A worker process failed. `exit_code()` is the worker's own, or 128 + N when signal N ended it.
class WorkerError : public Error {
 public:
  WorkerError(const std::string& message, int exit_code) : Error(message), exit_code_(exit_code) {}
  int exit_code() const noexcept override { return exit_code_; }

 private:
  int exit_code_;
};

/// A signal asked the process to stop, and the stack was unwound.
class InterruptedError : public Error {
 public:
  explicit InterruptedError(int signal_number);
  int exit_code() const noexcept override { return 128 + signal_number_; }
  int signal_number() const noexcept { return signal_number_; }

 private:
  int signal_number_;
};

/// The exit code for an exception that reached `main`: the error's own, else 1.
int exit_code_of(const std::exception& error) noexcept;

}  // namespace lockstep
