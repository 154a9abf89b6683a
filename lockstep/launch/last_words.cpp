#include "lockstep/launch/last_words.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <iostream>
#include <new>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/terminal.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/launch/error_file.h"
#include "lockstep/launch/variables.h"

namespace lockstep::launch {
namespace {

/// What ended the program.
struct Ending {
  std::string text;
  int code = kExitFailure;
  std::optional<Failure> failure{};  ///< Between ranks.
  bool consequence = false;          ///< Of another rank's end.
  bool is_error = true;              ///< Else it was asked to stop.
};

Ending ending_of(const std::exception_ptr& error) {
  if (!error) {
    return {.text =
                "std::terminate was called without an exception\n  hint: a std::thread that is "
                "destroyed before join() or detach() does that"};
  }
  Ending ending{.text = whole_text(error)};
  try {
    std::rethrow_exception(error);
  } catch (const InterruptedError& interrupted) {
    ending.code = interrupted.exit_code();
    ending.is_error = false;
  } catch (const std::bad_alloc&) {
    ending.text = "out of memory";
  } catch (const std::exception& other) {
    ending.code = exit_code_of(other);
    ending.consequence = dynamic_cast<const PeerLostError*>(&other) != nullptr;
    if (const auto* between_ranks = dynamic_cast<const CommError*>(&other))
      ending.failure = between_ranks->failure();
  } catch (...) {  // NOLINT(bugprone-empty-catch): its text says all that is known.
  }
  while (ending.text.ends_with('\n')) ending.text.pop_back();
  return ending;
}

void flush_output() {
  std::fflush(stdout);
  try {
    std::cout.flush();  // It has a buffer of its own after sync_with_stdio(false).
  } catch (...) {  // It throws where the program has asked for that; the failure is worth more.
  }
}

/// The parent or the launcher prints it, once for all ranks.
bool somebody_else_tells(const Ending& ending) {
  return parent_reports_errors() || (ending.consequence && env_string(kTokenVariable));
}

void print(const Ending& ending, std::optional<int> rank) {
  const std::string text = rank ? told_by(*rank, ending.text) : ending.text;
  const std::string line =
      std::string(line_start(STDERR_FILENO)) + (ending.is_error ? "error: " : "") + text + "\n";
  write_all(STDERR_FILENO, line.data(), line.size(), "standard error");
}

void report(const Ending& ending) {
  write_error_file(ending.text, ending.code, ending.failure ? &*ending.failure : nullptr);
}

// A terminate handler gets nothing, so what it needs cannot but be global.
std::optional<int> own_rank;
std::terminate_handler handler_before = nullptr;

/// Only the first of several threads speaks, and a failure within it is the end.
void expect_first() {
  static std::atomic<bool> begun{false};
  thread_local bool by_this_thread = false;
  if (by_this_thread) _exit(kExitFailure);
  by_this_thread = true;
  while (begun.exchange(true)) ::pause();
}

[[noreturn]] void at_terminate() {
  expect_first();
  const auto error = std::current_exception();
  if (handler_before) {
    report(ending_of(error));
    handler_before();
  }
  _exit(tell_failure(error, own_rank));
}

bool is_default(std::terminate_handler handler) {
  return !handler || handler == __gnu_cxx::__verbose_terminate_handler;
}

}  // namespace

int tell_failure(const std::exception_ptr& error, std::optional<int> rank) noexcept {
  int code = kExitFailure;
  try {
    const Ending ending = ending_of(error);
    code = ending.code;
    flush_output();
    report(ending);
    if (!somebody_else_tells(ending)) print(ending, rank);
  } catch (...) {  // No memory for the words, or nobody who reads them: the exit code still tells.
  }
  return code;
}

void end_in_words(std::optional<int> rank) {
  own_rank = rank;
  const auto before = std::set_terminate(at_terminate);
  if (before != at_terminate) handler_before = is_default(before) ? nullptr : before;
}

}  // namespace lockstep::launch
