#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/rpc/handler_threads.h"
#include "lockstep/rpc/transport.h"

namespace lockstep::rpc::detail {

/// This process as a worker. LibTorch keeps one agent, one table of references and one of autograd
/// contexts in a process, so there is one.
class Worker {
 public:
  struct Setup {
    Store store;
    std::string name;
    int rank = 0, size = 1;
    int threads = 16;
    std::chrono::milliseconds timeout{};
    bool one_host = true;
  };
  /// Meets the others. Throws as `rpc::init`.
  static std::shared_ptr<Worker> start(const Setup& setup);
  /// Leaves at once, unless it has left already.
  ~Worker();

  const std::string& name() const { return name_; }
  std::vector<std::string> workers() const;
  Transport& transport() { return *transport_; }

  void leave_together(std::chrono::milliseconds limit);
  void leave_now() noexcept;

 private:
  explicit Worker(const Setup& setup);

  const std::string name_;
  HandlerThreads threads_;
  std::unique_ptr<Transport> transport_;
  bool left_ = false;
};

/// The process's worker. Throws UsageError, which says what was called, when there is none.
std::shared_ptr<Worker> this_worker(const char* what);

}  // namespace lockstep::rpc::detail
