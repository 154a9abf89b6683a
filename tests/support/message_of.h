#pragma once

// For tests: what an error says.

#include <exception>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::test {

/// The text of the `Expected` that `call` throws; else what happened in its place.
template <class Expected = UsageError, class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

}  // namespace lockstep::test
