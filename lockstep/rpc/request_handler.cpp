#include "lockstep/rpc/request_handler.h"

#include <torch/csrc/distributed/autograd/autograd.h>
#include <torch/csrc/distributed/autograd/rpc_messages/cleanup_autograd_context_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_resp.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/distributed/rpc/script_resp.h>

#include <atomic>

#include "lockstep/rpc/failure.h"
#include "lockstep/rpc/guarded_agent.h"
#include "lockstep/rpc/handler_threads.h"
#include "lockstep/rpc/registry.h"
#include "lockstep/rpc/running_functions.h"
#include "lockstep/rpc/wire_call.h"

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;
using FuturePtr = c10::intrusive_ptr<native::JitFuture>;
using Streams = std::vector<c10::Stream>;

c10::TypePtr message_type() {
  static const auto type = c10::getCustomClassType<c10::intrusive_ptr<native::Message>>();
  return type;
}

void forward(const FuturePtr& from, const FuturePtr& to) {
  from->addCallback([to](native::JitFuture& done) {
    if (done.hasError()) {
      to->setError(done.exception_ptr());
    } else {
      to->markCompleted(done.value(), done.storages());
    }
  });
}

class RequestHandler final : public native::RequestCallbackNoPython {
 public:
  RequestHandler(std::string worker, std::shared_ptr<Guard> guard, HandlerThreads& threads,
                 RunningFunctions& running, const ServeLimits& limits)
      : worker_(std::move(worker)),
        guard_(std::move(guard)),
        threads_(threads),
        running_(running),
        limits_(limits) {}

  FuturePtr processMessage(native::Message& request, Streams streams) const override {
    Seal::Opened opened;
    try {
      opened = guard_->seal.open_request(request);
      check_message(request, guard_->limits);
      note(request, opened.sender);
    } catch (...) {
      auto refused = c10::make_intrusive<native::JitFuture>(message_type());
      refused->setError(failure(std::current_exception(), "?"));
      return refused;
    }
    return handle(request, std::move(streams))
        ->then([this, opened](native::JitFuture& done) { return sealed(done, opened); },
               message_type());
  }

 protected:
  FuturePtr handle(native::Message& request, Streams streams) const {
    if (inline_.fetch_add(1) < limits_.on_transport) {
      auto answer = RequestCallbackNoPython::processMessage(request, std::move(streams));
      inline_.fetch_sub(1);
      return answer;
    }
    inline_.fetch_sub(1);
    return on_other_thread(request, std::move(streams));
  }

  FuturePtr processScriptCall(native::RpcCommandBase& rpc, const Streams&) const override {
    return run(static_cast<native::ScriptCall&>(rpc).stackRef())
        ->then(
            [](native::JitFuture& done) {
              return native::withStorages(native::ScriptResp(done.value()).toMessage());
            },
            message_type());
  }

  FuturePtr processScriptRemoteCall(native::RpcCommandBase& rpc, const Streams&) const override {
    auto& call = static_cast<native::ScriptRemoteCall&>(rpc);
    auto answer = assignOwnerRRef(call.retRRefId(), call.retForkId(), run(call.stackRef()));
    guard_->holders.add(call.retForkId().createdOn_, call.retRRefId(), call.retForkId());
    return answer;
  }

  FuturePtr processRRefBackward(native::RpcCommandBase& rpc) const override {
    auto& request = static_cast<torch::distributed::autograd::RRefBackwardReq&>(rpc);
    return retrieveOwnerRRef(request.getRRefId())
        ->then(
            [context = request.getAutogradContextId(),
             retain = request.retainGraph()](native::JitFuture& done) {
              torch::distributed::autograd::backward(context, {done.value().toTensor()}, retain);
              return native::withStorages(
                  torch::distributed::autograd::RRefBackwardResp().toMessage());
            },
            message_type());
  }

  // LibTorch's own looks into the reference, which is null unless this was the last fork.
  void handleRRefDelete(c10::intrusive_ptr<native::RRef>&) const override {}

 private:
  // Who has which references to what is here.
  void note(const native::Message& request, int sender) const {
    auto& holders = guard_->holders;
    switch (request.type()) {
      case native::MessageType::RREF_FORK_REQUEST: {
        const auto fork = native::RRefForkRequest::fromMessage(request);
        holders.add(sender, fork->rrefId(), fork->forkId());
        break;
      }
      case native::MessageType::RREF_CHILD_ACCEPT:
        holders.accepted(native::RRefChildAccept::fromMessage(request)->forkId());
        break;
      case native::MessageType::RREF_USER_DELETE:
        holders.remove(native::RRefUserDelete::fromMessage(request)->forkId());
        break;
      case native::MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ:
        holders.remove_context(
            torch::distributed::autograd::CleanupAutogradContextReq::fromMessage(request)
                ->getContextId());
        break;
      default:
        break;
    }
  }

  std::tuple<MessagePtr, std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>> sealed(
      native::JitFuture& done, const Seal::Opened& request) const {
    if (done.hasError()) std::rethrow_exception(done.exception_ptr());
    const auto answer = done.value().toCustomClass<native::Message>();
    try {
      guard_->holders.add(request.sender, check_message(*answer, guard_->limits));
    } catch (...) {
      std::rethrow_exception(failure(std::current_exception(), "?"));
    }
    return native::withStorages(guard_->seal.close(answer, request.sender, request.number));
  }

  FuturePtr on_other_thread(native::Message& request, Streams streams) const {
    auto owned = c10::make_intrusive<native::Message>(std::move(request).movePayload(),
                                                      std::move(request).moveTensors(),
                                                      request.type(), request.id());
    auto answer = c10::make_intrusive<native::JitFuture>(message_type());
    threads_.run([this, owned, answer, streams = std::move(streams)]() mutable {
      forward(RequestCallbackNoPython::processMessage(*owned, std::move(streams)), answer);
    });
    return answer;
  }

  // The function's result, or its failure as a text.
  FuturePtr run(std::vector<at::IValue>& stack) const {
    auto answer = c10::make_intrusive<native::JitFuture>(at::AnyType::get());
    std::string name = "?";
    try {
      WireCall call(stack);
      name = call.name;
      check_load(call, answer);
      const HandlerThreads::HandlerScope scope(call.depth);
      const Registered& function = registered(name);
      if (function.signature.hash != call.types_hash) {
        answer->setError(as_error(encode_mismatch(name, worker_, function.signature.types)));
        return answer;
      }
      const RunningFunctions::Scope runs(running_, function.signature.name);
      finish(function.handler(call.arguments), name, answer);
    } catch (...) {
      answer->setError(failure(std::current_exception(), name));
    }
    return answer;
  }

  // Counts the call until it is answered. Throws when there are too many.
  void check_load(const WireCall& call, const FuturePtr& answer) const {
    if (call.depth < 1 || call.depth > limits_.depth) {
      throw UsageError("rpc: a call within " + std::to_string(call.depth - 1) +
                           " others; expected fewer than " + std::to_string(limits_.depth),
                       "does a function call itself without end? Options::max_call_depth is the "
                       "limit");
    }
    const auto served = served_;
    if (served->fetch_add(1) >= limits_.at_once) {
      served->fetch_sub(1);
      throw CommError("rpc: the worker has " + std::to_string(limits_.at_once) +
                      " calls that are not answered yet (Options::max_served)");
    }
    answer->addCallback([served](native::JitFuture&) { served->fetch_sub(1); });
    auto& contexts = torch::distributed::autograd::DistAutogradContainer::getInstance();
    if (contexts.hasValidContext()) guard_->holders.add_context(contexts.currentContextId());
  }

  void finish(HandlerResult result, const std::string& name, const FuturePtr& answer) const {
    if (!result.later) {
      answer->markCompleted(std::move(result.value));
      return;
    }
    // The result may come when the worker has left, and then nobody is to be answered.
    const std::weak_ptr<native::RpcAgent> agent = native::RpcAgent::getCurrentRpcAgent();
    result.later->when_done([this, agent, name, answer, state = std::weak_ptr(result.later)] {
      const auto serves = agent.lock();
      if (!serves) return;
      try {
        answer->markCompleted(state.lock()->value({}));
      } catch (...) {
        answer->setError(failure(std::current_exception(), name));
      }
    });
  }

  static std::exception_ptr as_error(const std::string& text) {
    return std::make_exception_ptr(std::runtime_error(text));
  }
  std::exception_ptr failure(const std::exception_ptr& error, const std::string& name) const {
    return as_error(encode_failure(error, worker_, name));
  }

  const std::string worker_;
  const std::shared_ptr<Guard> guard_;
  HandlerThreads& threads_;
  RunningFunctions& running_;
  const ServeLimits limits_;
  mutable std::atomic<int> inline_{0};
  /// Calls that are not answered yet. Answers may come when this is gone.
  const std::shared_ptr<std::atomic<int64_t>> served_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace

std::unique_ptr<native::RequestCallback> make_request_handler(std::string worker,
                                                              std::shared_ptr<Guard> guard,
                                                              HandlerThreads& threads,
                                                              RunningFunctions& running,
                                                              const ServeLimits& limits) {
  return std::make_unique<RequestHandler>(std::move(worker), std::move(guard), threads, running,
                                          limits);
}

}  // namespace lockstep::rpc::detail
