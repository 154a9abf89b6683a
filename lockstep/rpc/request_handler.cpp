
#include <torch/csrc/distributed/autograd/autograd.h>
#include <torch/csrc/distributed/autograd/rpc_messages/cleanup_autograd_context_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rpc_with_autograd.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_resp.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/distributed/rpc/script_resp.h>

#include <atomic>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/rpc/call_runner.h"
#include "lockstep/rpc/guarded_agent.h"
#include "lockstep/rpc/handler_threads.h"
#include "lockstep/rpc/sent_tensors.h"

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
  RequestHandler(std::shared_ptr<const CallRunner> runner, std::shared_ptr<Guard> guard,
                 HandlerThreads& threads, int on_transport)
      : runner_(std::move(runner)),
        guard_(std::move(guard)),
        threads_(threads),
        on_transport_(on_transport) {}

  FuturePtr processMessage(native::Message& request, Streams streams) const override {
    Seal::Opened opened;
    try {
      opened = guard_->seal.open_request(request);
      note(request, opened.sender);
    } catch (...) {
      return refused(std::current_exception());
    }
    return handle(request, std::move(streams))
        ->then([this, opened](native::JitFuture& done) { return sealed(done, opened); },
               message_type());
  }

 protected:
  FuturePtr handle(native::Message& request, Streams streams) const {
    if (inline_.fetch_add(1) < on_transport_) {
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
      make_readable(answer->tensors());
      guard_->holders.add(request.sender, references_in(*answer));
    } catch (...) {
      guard_->holders.take_back(references_in(*answer));
      std::rethrow_exception(refusal(std::current_exception()));
    }
    return native::withStorages(guard_->seal.close(answer, request.sender, request.number));
  }

  FuturePtr on_other_thread(native::Message& request, Streams streams) const {
    // Each of the moves takes one part.
    // NOLINTNEXTLINE(bugprone-use-after-move)
    auto owned = c10::make_intrusive<native::Message>(std::move(request).movePayload(),
                                                      std::move(request).moveTensors(),  // NOLINT
                                                      request.type(), request.id());     // NOLINT
    auto answer = c10::make_intrusive<native::JitFuture>(message_type());
    threads_.run([this, owned, answer, streams = std::move(streams)]() mutable {
      forward(RequestCallbackNoPython::processMessage(*owned, std::move(streams)), answer);
    });
    return answer;
  }

  // The function's result, or its failure as a text.
  FuturePtr run(std::vector<at::IValue>& stack) const {
    auto answer = c10::make_intrusive<native::JitFuture>(at::AnyType::get());
    try {
      note_context();
      // The result may come when the worker has left, and then nobody is to be answered.
      const std::weak_ptr<native::RpcAgent> agent = native::RpcAgent::getCurrentRpcAgent();
      auto outcome =
          runner_->run(std::move(stack), [agent, runner = runner_, answer](CallOutcome late) {
            if (const auto serves = agent.lock()) settle(*runner, answer, std::move(late));
          });
      if (outcome) settle(*runner_, answer, std::move(*outcome));
    } catch (...) {
      answer->setError(refusal(std::current_exception()));
    }
    return answer;
  }

  static void settle(const CallRunner& runner, const FuturePtr& answer, CallOutcome outcome) {
    if (outcome.failure) {
      answer->setError(as_error(*outcome.failure));
      return;
    }
    try {
      answer->markCompleted(std::move(outcome.value));
    } catch (...) {  // LibTorch does not know what the value is made of.
      answer->setError(as_error(*runner.refused(std::current_exception()).failure));
    }
  }

  void note_context() const {
    auto& contexts = torch::distributed::autograd::DistAutogradContainer::getInstance();
    if (contexts.hasValidContext()) guard_->holders.add_context(contexts.currentContextId());
  }

  static std::exception_ptr as_error(const std::string& text) {
    return std::make_exception_ptr(std::runtime_error(text));
  }
  std::exception_ptr refusal(const std::exception_ptr& error) const {
    return as_error(*runner_->refused(error).failure);
  }

  FuturePtr refused(const std::exception_ptr& error) const {
    auto answer = c10::make_intrusive<native::JitFuture>(message_type());
    answer->setError(refusal(error));
    return answer;
  }

  const std::shared_ptr<const CallRunner> runner_;
  const std::shared_ptr<Guard> guard_;
  HandlerThreads& threads_;
  const int on_transport_;
  mutable std::atomic<int> inline_{0};
};

}  // namespace

std::unique_ptr<native::RequestCallback> make_request_handler(
    std::shared_ptr<const CallRunner> runner, std::shared_ptr<Guard> guard, HandlerThreads& threads,
    int on_transport) {
  return std::make_unique<RequestHandler>(std::move(runner), std::move(guard), threads,
                                          on_transport);
}

}  // namespace lockstep::rpc::detail
