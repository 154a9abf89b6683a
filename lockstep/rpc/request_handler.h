#pragma once

#include <memory>

namespace torch::distributed::rpc {
class RequestCallback;
}

namespace lockstep::rpc::detail {

class CallRunner;
struct Guard;
class HandlerThreads;

/// Answers what other workers ask: runs registered functions, and lets LibTorch do its own part for
/// references and autograd. Requests run on the transport's own threads, which saves a change of
/// threads, up to `on_transport`; the others on `threads`, which must outlive the result. What
/// cannot be read, or is not sealed, fails the request.
std::unique_ptr<torch::distributed::rpc::RequestCallback> make_request_handler(
    std::shared_ptr<const CallRunner> runner, std::shared_ptr<Guard> guard, HandlerThreads& threads,
    int on_transport);

}  // namespace lockstep::rpc::detail
