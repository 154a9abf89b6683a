#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace lockstep::test_wait {

/// For tests: waits until `condition()` is true, on any thread. Throws when that has not come
/// within `limit`. So a test that waits in vain fails with the place of the wait and does not hang.
template <class Condition>
void wait_until(const Condition& condition, const char* what,
                std::chrono::milliseconds limit = std::chrono::seconds(30)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      throw std::runtime_error(std::string("waited in vain for ") + what);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace lockstep::test_wait
