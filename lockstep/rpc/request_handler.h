#pragma once

#include <memory>
#include <string>

namespace torch::distributed::rpc {
class RequestCallback;
}

namespace lockstep::rpc::detail {

struct Guard;
class HandlerThreads;
class RunningFunctions;

struct ServeLimits {
  int on_transport = 8;      ///< Requests that run on the transport's own threads.
  int64_t at_once = 65'536;  ///< Functions that are not answered yet.
  int64_t depth = 2'048;     ///< Of calls within calls.
};

/// Answers what other workers ask: runs registered functions, and lets LibTorch do its own part for
/// references and autograd. Requests run on the transport's own threads, which saves a change of
/// threads, up to the limit; the others on `threads`. What cannot be read, or is not sealed, fails
/// the request. These and `running` must outlive the result.
std::unique_ptr<torch::distributed::rpc::RequestCallback> make_request_handler(
    std::string worker, std::shared_ptr<Guard> guard, HandlerThreads& threads,
    RunningFunctions& running, const ServeLimits& limits);

}  // namespace lockstep::rpc::detail
