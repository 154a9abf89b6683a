#pragma once

#include <exception>
#include <string>

namespace lockstep {

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
