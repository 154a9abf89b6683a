#include "lockstep/comm/checks/p2p_checks.h"

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/checks/failure_kind.h"

namespace lockstep {
namespace {

template <class Request>
auto at_store(CheckContext& context, const CallSignature& call, Request request) {
  try {
    return request(context.store());
  } catch (const std::exception& e) {
    if (!is_store_lost(e)) throw;
    std::rethrow_exception(context.store_lost(describe(call, context.names()) + " of group '" +
                                              context.group() + "'"));
  }
}

std::exception_ptr difference_error(const CheckContext& context, int peer,
                                    const std::string& difference) {
  return mismatch_error(mismatch_of(context.ranks_of_message(peer), difference));
}

/// A receive that came before its send, which leaves its word under `key` where the two differ.
class FirstReceive final : public c10d::Work {
 public:
  FirstReceive(std::shared_ptr<CheckContext> context, CallSignature call, std::string key,
               P2PChecks::WorkPtr inner)
      : c10d::Work(context->rank(), inner->retrieveOpType()),
        context_(std::move(context)),
        call_(std::move(call)),
        key_(std::move(key)),
        inner_(std::move(inner)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess() && !exception(); }
  int sourceRank() const override { return call_.root; }
  void abort() override { inner_->abort(); }
  std::exception_ptr exception() const override {
    const auto error = inner_->exception();
    return error || !inner_->isCompleted() ? error : difference();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    if (!done) return false;
    if (const auto error = difference()) std::rethrow_exception(error);
    return true;
  }

 private:
  /// What the send has told, of which the message has come.
  std::exception_ptr difference() const {
    const std::lock_guard lock(mutex_);
    if (std::exchange(has_looked_, true)) return error_;
    try {
      at_store(*context_, call_, [this](c10d::Store& store) {
        const std::string word = store.get_to_str(key_);
        store.deleteKey(key_);
        if (word != encode(call_)) error_ = difference_error(*context_, call_.root, word);
      });
    } catch (...) {
      error_ = std::current_exception();
    }
    return error_;
  }

  const std::shared_ptr<CheckContext> context_;
  const CallSignature call_;
  const std::string key_;
  const P2PChecks::WorkPtr inner_;
  mutable bool has_looked_ = false;
  mutable std::exception_ptr error_;
};

}  // namespace

P2PChecks::WorkPtr P2PChecks::run(CallSignature call, std::vector<at::Tensor>& tensors, int tag,
                                  const Issue& issue) {
  const bool sends = call.operation == Operation::send;
  const std::lock_guard lock(mutex_);
  if (call.operation == Operation::recv_any) any_tags_.insert(tag);
  if (!sends && any_tags_.contains(tag)) return issue(tensors);
  uint64_t& number = (sends ? sends_ : receives_)[{call.root, tag}];
  if (!checks_.compares(number + 1)) return issue(tensors);
  call.sequence = ++number;
  const int sender = sends ? context_->rank() : call.root;
  const int receiver = sends ? call.root : context_->rank();
  const std::string key = c10::str("p2p/", sender, "/", receiver, "/", tag, "/", number);
  const auto at_key = [&](auto request) { return at_store(*context_, call, request); };
  const std::string mine = encode(call);
  const std::string found =
      at_key([&](c10d::Store& store) { return store.compareSet(key, "", mine); });
  if (found == mine) {
    WorkPtr work = issue(tensors);
    if (sends) return work;
    return c10::make_intrusive<FirstReceive>(context_, call, key, std::move(work));
  }
  const CallSignature other = decode(found);
  const auto difference = find_p2p_mismatch(sends ? call : other, sender, sends ? other : call,
                                            receiver, tag, context_->names(), context_->group());
  if (!sends) at_key([&](c10d::Store& store) { store.deleteKey(key); });
  if (!difference) return issue(tensors);
  if (sends) at_key([&](c10d::Store& store) { store.set(key, *difference); });
  const TensorSignature& fits = (sends ? other.outputs : other.inputs).at(0);
  std::vector<at::Tensor> unread{at::zeros(fits.shape, fits.dtype)};
  answers_.emplace_back(unread[0], issue(unread));
  std::rethrow_exception(difference_error(*context_, call.root, *difference));
}

}  // namespace lockstep
