#pragma once

#include <memory>
#include <string>

namespace torch::distributed::rpc {
class RequestCallback;
}

namespace lockstep::rpc::detail {

class HandlerThreads;
class RunningFunctions;

/// Answers what other workers ask: runs registered functions, and lets LibTorch do its own part for
/// references and autograd. `inline_limit`: so many requests run on the transport's own threads,
/// which saves a change of threads; the others on `threads`. These and `running` must outlive the
/// result.
std::unique_ptr<torch::distributed::rpc::RequestCallback> make_request_handler(
    std::string worker, HandlerThreads& threads, RunningFunctions& running, int inline_limit);

}  // namespace lockstep::rpc::detail
