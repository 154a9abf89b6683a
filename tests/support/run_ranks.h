#pragma once

// For tests: ranks as threads of this process.

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::test {

/// What a CommError carries; nothing for another end.
inline Failure failure_in(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const CommError& e) {
    return e.failure();
  } catch (...) {
  }
  return {};
}

/// Whether a failure, or one of its causes, is of the kind and concerns the rank.
inline bool tells(const Failure& failure, Failure::Kind kind, int rank) {
  return failure.has(kind) && failure.concerns(rank);
}

/// How a rank's part ended.
struct Outcome {
  std::exception_ptr error;
  Failure failure() const { return failure_in(error); }
  bool ok() const { return !error; }
  std::string text() const {
    if (!error) return {};
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      return e.what();
    } catch (...) {
      return "an exception of an unknown type";
    }
  }
  template <class E>
  bool is() const {
    if (!error) return false;
    try {
      std::rethrow_exception(error);
    } catch (const E&) {
      return true;
    } catch (...) {
      return false;
    }
  }
};

template <class F>
Outcome outcome_of(F&& part) {
  try {
    part();
    return {};
  } catch (...) {
    return {std::current_exception()};
  }
}

/// Runs `body` once per rank, each on a thread of its own, and returns when all have ended.
[[nodiscard]] inline std::vector<Outcome> run_ranks(int size,
                                                    const std::function<void(int rank)>& body) {
  std::vector<Outcome> outcomes(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back(
        [&, rank] { outcomes[static_cast<size_t>(rank)] = outcome_of([&] { body(rank); }); });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

inline void rethrow_first(const std::vector<Outcome>& outcomes) {
  for (const auto& outcome : outcomes) {
    if (outcome.error) std::rethrow_exception(outcome.error);
  }
}

inline void expect_ok(const std::vector<Outcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank)
    EXPECT_TRUE(outcomes[rank].ok()) << "rank " << rank << ": " << outcomes[rank].text();
}

}  // namespace lockstep::test
