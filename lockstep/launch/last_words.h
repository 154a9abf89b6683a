#pragma once

#include <exception>
#include <optional>

namespace lockstep::launch {

/// Writes the failure where the launcher reads it (TORCHELASTIC_ERROR_FILE), and to standard error
/// as "error: rank 1: text" unless somebody else says it: the parent of a spawned rank does. So
/// does `lockstep run` of a rank that only lost its peer. What stdio and std::cout still hold is
/// written first. Returns the exit code for it. `rank`: none outside a job of several.
int tell_failure(const std::exception_ptr& error, std::optional<int> rank) noexcept;

/// From here on std::terminate, which an exception that nobody catches calls in whatever thread,
/// ends the process by `tell_failure` and its exit code. No destructor runs and nothing else is
/// flushed, as at abort. A handler that the program has set before is called in place of the
/// message, when the launcher's file is written. It ends the process its own way.
void end_in_words(std::optional<int> rank);

}  // namespace lockstep::launch
