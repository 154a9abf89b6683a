#pragma once

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <thread>

namespace lockstep {

/// What `f()` gives or throws, on a thread of its own. None where it takes longer: the thread is
/// then left to itself, so `f` must own what it uses.
template <class F>
auto in_time(F f, std::chrono::milliseconds longest) -> std::optional<decltype(f())> {
  auto made = std::make_shared<std::promise<decltype(f())>>();
  auto result = made->get_future();
  std::thread([made, f] {
    try {
      made->set_value(f());
    } catch (...) {
      made->set_exception(std::current_exception());
    }
  }).detach();
  if (result.wait_for(longest) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace lockstep
