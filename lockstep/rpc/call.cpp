#include "lockstep/rpc/call.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/utils.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/rpc/guarded_agent.h"
#include "lockstep/rpc/remote_failure.h"
#include "lockstep/rpc/rpc_worker.h"

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;
using Answer = c10::intrusive_ptr<native::JitFuture>;

// LibTorch looks for a TorchScript function's name here. Ours is in the call.
const c10::QualifiedName& carrier() {
  static const c10::QualifiedName name("lockstep");
  return name;
}

float seconds_of(Limit timeout) {
  return timeout ? std::chrono::duration<float>(*timeout).count() : native::kUnsetRpcTimeout;
}

const native::WorkerInfo& worker_info(Worker& worker, const std::string& name) {
  try {
    return worker.agent()->getWorkerInfo(name);
  } catch (const UsageError&) {
    throw UsageError("rpc: " + unknown_word("worker", name, worker.peers().names()));
  }
}

/// Counts a call as under way until the last copy is gone.
std::shared_ptr<void> count_call(const std::shared_ptr<Worker>& worker, const std::string& what,
                                 Limit timeout) {
  // Zero would be no limit for LibTorch.
  if (timeout) check_timeout(what + ": the time-out", *timeout);
  Limit wait;
  if (!HandlerThreads::on_one()) wait = timeout.value_or(default_timeout());
  if (!worker->calls().begin(wait)) {
    throw TimeoutError(what + ": " + std::to_string(worker->calls().limit()) +
                           " calls of this worker were under way for " + seconds_text(*wait),
                       "wait for answers, or raise Options::max_pending");
  }
  return std::shared_ptr<void>(worker.get(), [weak = std::weak_ptr(worker)](void*) {
    if (const auto held = weak.lock()) held->calls().end();
  });
}

using torch::distributed::autograd::DistAutogradContainer;

/// The autograd context of this thread, by its number. A call may outlive it.
std::optional<int64_t> context_here() {
  if (!DistAutogradContainer::getInstance().hasValidContext()) return std::nullopt;
  return DistAutogradContainer::currentContextId();
}
bool has_ended(const std::optional<int64_t>& context) {
  try {
    if (context) DistAutogradContainer::getInstance().retrieveContext(*context);
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

std::string what(const Signature& signature, const std::string& worker) {
  return "rpc: '" + signature.name + "' on worker '" + worker + "'";
}

std::shared_ptr<CallState> send(Worker& worker, const native::WorkerInfo& to,
                                const Signature& signature, std::vector<at::IValue> arguments,
                                Limit timeout) {
  auto state = std::make_shared<CallState>();
  const auto failed = [state, what = what(signature, to.name_), types = signature.types,
                       context = context_here()](const std::exception_ptr& error) {
    state->fail(decode_failure(error, what, types, has_ended(context)));
  };
  try {
    native::ScriptCall message(carrier(), packed_call(signature, std::move(arguments)));
    torch::distributed::autograd::sendMessageWithAutograd(
        *worker.agent(), to, std::move(message).toMessage(),
        /*forceGradRecording=*/true, seconds_of(timeout))
        ->addCallback([state, failed](native::JitFuture& answer) {
          try {
            if (answer.hasError()) std::rethrow_exception(answer.exception_ptr());
            state->complete(native::deserializeRespToIValue(
                *answer.constValue().toCustomClass<native::Message>()));
          } catch (...) {
            failed(std::current_exception());
          }
        });
  } catch (...) {
    failed(std::current_exception());
  }
  return state;
}

/// Null: the call must go LibTorch's way. That also records what an autograd context is to know.
std::shared_ptr<CallState> send_fast(Worker& worker, const native::WorkerInfo& to,
                                     const Signature& signature,
                                     const std::vector<at::IValue>& arguments, Limit timeout,
                                     const std::string& text) {
  FastPath* const path = worker.fast_path();
  if (!path || context_here()) return nullptr;
  return path->call(to.id_, signature, arguments, timeout.value_or(worker.timeout()), text);
}

}  // namespace

std::shared_ptr<CallState> send_call(const Destination& to, const Signature& signature,
                                     std::vector<at::IValue> arguments) {
  const auto worker = this_worker("rpc::call");
  const auto& info = worker_info(*worker, to.worker);
  const std::string text = what(signature, to.worker);
  auto counted = count_call(worker, text, to.timeout);
  auto state = send_fast(*worker, info, signature, arguments, to.timeout, text);
  if (!state) state = send(*worker, info, signature, std::move(arguments), to.timeout);
  // Answered, failed or cancelled: then it counts no more.
  state->hold_until_done(std::move(counted));
  return state;
}

std::shared_ptr<CallState> send_call_to(int id, const Signature& signature,
                                        std::vector<at::IValue> arguments,
                                        std::chrono::milliseconds timeout) {
  const auto worker = this_worker("rpc: a call to another worker");
  const auto& info = worker->agent()->getWorkerInfo(static_cast<native::worker_id_t>(id));
  return send(*worker, info, signature, std::move(arguments), timeout);
}

namespace {

/// Sends the call whose result the reference and its fork are to.
using SendRemote = std::function<Answer(const native::RRefId&, const native::ForkId&)>;

/// A reference to what nobody makes would hold up each shutdown: so none is left of a call that was
/// not sent.
template <class Forget>
Answer sent_or_forgotten(const SendRemote& send, const native::RRefId& rref,
                         const native::ForkId& fork, const Forget& forget) {
  try {
    return send(rref, fork);
  } catch (...) {
    forget();
    throw;
  }
}

RRefPtr remote_here(const SendRemote& send, std::shared_ptr<void> counted) {
  auto& context = native::RRefContext::getInstance();
  auto owned = context.createOwnerRRef(at::AnyType::get());
  context.addSelfAsFork(owned);
  const auto id = owned->rrefId();
  sent_or_forgotten(send, id, id, [&] {
    context.delForkOfOwner(id, id);
  })->addCallback([counted = std::move(counted), id](auto& answer) {
    native::callback::finishCreatingOwnerRRef(answer, id);
  });
  return owned;
}

RRefPtr remote_there(int owner, const SendRemote& send, std::shared_ptr<void> counted) {
  auto& context = native::RRefContext::getInstance();
  auto user = context.createUserRRef(static_cast<native::worker_id_t>(owner), at::AnyType::get());
  const auto fork = user->forkId();
  context.addPendingUser(fork, user);
  sent_or_forgotten(send, user->rrefId(), fork, [&] {
    context.delPendingUser(fork);
  })->addCallback([counted = std::move(counted), fork](auto& answer) {
    native::callback::confirmPendingUser(answer, fork);
  });
  return user;
}

}  // namespace

RRefPtr send_remote(const Destination& to, const Signature& signature,
                    std::vector<at::IValue> arguments) {
  const auto worker = this_worker("rpc::remote");
  const auto& info = worker_info(*worker, to.worker);
  const std::string text = what(signature, to.worker);
  auto counted = count_call(worker, text, to.timeout);
  auto call = packed_call(signature, std::move(arguments));
  const auto send = [&](const native::RRefId& rref, const native::ForkId& fork) {
    native::ScriptRemoteCall message(carrier(), std::move(call), rref, fork,
                                     /*isAsyncExecution=*/false);
    return torch::distributed::autograd::sendMessageWithAutograd(
        *worker->agent(), info, std::move(message).toMessage(),
        /*forceGradRecording=*/true, seconds_of(to.timeout));
  };
  try {
    return info.id_ == worker->id() ? remote_here(send, std::move(counted))
                                    : remote_there(info.id_, send, std::move(counted));
  } catch (const std::exception&) {
    std::rethrow_exception(
        decode_failure(std::current_exception(), text, signature.types, has_ended(context_here())));
  }
}

const RRefPtr& checked(const RRefPtr& rref) {
  if (!rref) throw UsageError("rpc: the reference is empty");
  return rref;
}

RRefPtr rref_of(const at::IValue& value) {
  if (!value.isRRef()) throw_other_kind("rref", value);
  return value.toRRef();
}

RRefPtr own_value(at::IValue value) {
  this_worker("rpc::RRef::own");
  auto rref = native::RRefContext::getInstance().createOwnerRRef(at::AnyType::get());
  rref->setValue(std::move(value));
  return rref;
}

std::string owner_name(const RRefPtr& rref) {
  this_worker("rpc::RRef::owner_name");
  return checked(rref)->ownerName();
}

namespace {

/// Waits until LibTorch's future is done, in order or not.
void wait_for(native::JitFuture& future, std::chrono::milliseconds limit, const std::string& what) {
  const auto state = std::make_shared<CallState>(CallState::Ends::perhaps_not);
  future.addCallback([state](native::JitFuture&) { state->complete({}); });
  try {
    state->value(limit);
  } catch (const TimeoutError&) {
    throw TimeoutError(what + ": no value after " + seconds_text(limit),
                       "does the function that makes it still run?");
  }
}

}  // namespace

at::IValue local_value(const RRefPtr& rref, Limit limit) {
  if (!checked(rref)->isOwner()) {
    throw UsageError(
        "rpc: local_value of a reference to what worker '" + owner_name(rref) + "' owns",
        "call a function there, or copy the value by to_here()");
  }
  if (limit) check_timeout("rpc: local_value", *limit);
  const auto owned = c10::static_intrusive_pointer_cast<native::OwnerRRef>(rref);
  try {
    if (!owned->hasValue()) {
      wait_for(*owned->getFuture(), limit.value_or(default_timeout()), "rpc: local_value");
    }
    return owned->getValue();
  } catch (const std::exception&) {
    std::rethrow_exception(decode_failure(std::current_exception(), "rpc: the reference", ""));
  }
}

at::IValue fetch_value(const RRefPtr& rref, Limit limit) {
  if (checked(rref)->isOwner()) return local_value(rref, limit);
  if (limit) check_timeout("rpc: to_here", *limit);
  const auto worker = this_worker("rpc::RRef::to_here");
  const HandlerThreads::Waiting waiting;
  try {
    return c10::static_intrusive_pointer_cast<native::UserRRef>(rref)->toHere(seconds_of(limit));
  } catch (const std::exception&) {
    std::rethrow_exception(decode_failure(
        std::current_exception(), "rpc: to_here from worker '" + owner_name(rref) + "'", ""));
  }
}

namespace {

/// An object of any class in a value.
struct Holder final : torch::CustomClassHolder {
  Holder(std::shared_ptr<void> held, const std::type_info& its_type)
      : object(std::move(held)), type(&its_type) {}
  std::shared_ptr<void> object;
  const std::type_info* type;
};

}  // namespace

at::IValue hold_object(std::shared_ptr<void> object, const std::type_info& type) {
  return at::IValue::make_capsule(c10::make_intrusive<Holder>(std::move(object), type));
}

std::shared_ptr<void> held_object(const at::IValue& value, const std::type_info& type) {
  if (!value.isCapsule()) throw_other_kind("object", value);
  const auto capsule = value.toCapsule();
  const auto* holder = dynamic_cast<const Holder*>(capsule.get());
  if (!holder || *holder->type != type) {
    throw UsageError(std::string("rpc: the reference is to another class than ") + type.name());
  }
  return holder->object;
}

}  // namespace lockstep::rpc::detail
