#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>

#include "lockstep/base/failure.h"

namespace lockstep::launch {

/// What a worker says about its own failure, in the file that the launcher named to it by
/// TORCHELASTIC_ERROR_FILE. The format is torch.distributed.elastic's, so either side may be
/// Python. `message.failure` is ours.
struct ErrorReport {
  std::string message;             ///< "MismatchError: ..." or any text
  int64_t timestamp = 0;           ///< seconds since 1970; 0 when the worker did not say
  std::optional<Failure> failure;  ///< Between ranks, where the worker says so.

  /// Whether the worker failed because another one was lost.
  bool consequence() const;
};

/// Writes the report of `error` to the file that TORCHELASTIC_ERROR_FILE names. Writes nothing when
/// it is unset, or already written (the first failure is the cause). Never throws: a worker that
/// fails must still end with its own error.
void write_error_file(const std::exception& error) noexcept;
/// The same of what is known of a failure. `failure`: between ranks; null: of another kind.
void write_error_file(const std::string& message, int exit_code, const Failure* failure) noexcept;

/// The report in `path`. None when the file is missing, empty or not of this format.
std::optional<ErrorReport> read_error_file(const std::filesystem::path& path);

/// True in a worker of `lockstep::spawn`. The parent reads the error file and prints the failure.
/// So the worker itself stays silent about it and the user reads it once.
bool parent_reports_errors();

/// "rank 1: message". A message that begins with this rank stays as it is.
std::string told_by(int rank, const std::string& message);

}  // namespace lockstep::launch
