#pragma once

// For tests: what an error says, and whom it concerns.

#include <exception>
#include <string>
#include <typeinfo>
#include <vector>

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

/// The ranks that the `Expected`, a CommError that `call` throws, concerns. None for another end.
template <class Expected, class Call>
std::vector<int> ranks_of(Call&& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.ranks();
  } catch (const std::exception&) {
    return {};
  }
  return {};
}

/// Whether `call` throws a CommError of no further type: not one of a time-out or a lost peer.
template <class Call>
bool is_plain_comm_error(Call&& call) {
  try {
    call();
  } catch (const CommError& error) {
    return typeid(error) == typeid(CommError);
  }
  return false;
}

}  // namespace lockstep::test
