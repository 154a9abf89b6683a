#include "lockstep/rpc/request_handler.h"

#include <torch/csrc/distributed/autograd/autograd.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_resp.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/script_resp.h>

#include <atomic>

#include "lockstep/rpc/failure.h"
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
  RequestHandler(std::string worker, HandlerThreads& threads, RunningFunctions& running,
                 int inline_limit)
      : worker_(std::move(worker)),
        threads_(threads),
        running_(running),
        inline_limit_(inline_limit) {}

  FuturePtr processMessage(native::Message& request, Streams streams) const override {
    if (inline_.fetch_add(1) < inline_limit_) {
      auto answer = RequestCallbackNoPython::processMessage(request, std::move(streams));
      inline_.fetch_sub(1);
      return answer;
    }
    inline_.fetch_sub(1);
    return on_other_thread(request, std::move(streams));
  }

 protected:
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
    return assignOwnerRRef(call.retRRefId(), call.retForkId(), run(call.stackRef()));
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
    const HandlerThreads::HandlerScope scope;
    try {
      WireCall call(stack);
      name = call.name;
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
  HandlerThreads& threads_;
  RunningFunctions& running_;
  const int inline_limit_;
  mutable std::atomic<int> inline_{0};
};

}  // namespace

std::unique_ptr<native::RequestCallback> make_request_handler(std::string worker,
                                                              HandlerThreads& threads,
                                                              RunningFunctions& running,
                                                              int inline_limit) {
  return std::make_unique<RequestHandler>(std::move(worker), threads, running, inline_limit);
}

}  // namespace lockstep::rpc::detail
