#pragma once
// See ../README.md. Contexts are only ever created and used inside libtorch_cpu.
#include <chrono>
#include <memory>
namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
}  // namespace gloo
