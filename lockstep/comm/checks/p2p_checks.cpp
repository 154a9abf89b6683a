#include "lockstep/comm/checks/p2p_checks.h"

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/failure_report.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds, std::chrono::steady_clock;

// What the key of a message holds after a signature: one of these, or how the calls differ.
constexpr const char *kGivenUp = "!", *kAgreed = "=";

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

/// A call that came first, or one that differs from its counterpart.
class ComparedWork final : public c10d::Work {
 public:
  struct Parts {
    std::shared_ptr<CheckContext> context;
    CallSignature call;
    int tag = 0;
    std::string signature, key = {}, any_key = {};  ///< The last one for sends.
    P2PChecks::WorkPtr inner = {};
  };
  explicit ComparedWork(Parts parts, const std::string& difference = {})
      : c10d::Work(parts.context->rank(), parts.inner->retrieveOpType()), its_(std::move(parts)) {
    if (!difference.empty()) settle(difference);
  }

  bool isCompleted() override { return settled() && (its_.inner->isCompleted() || exception()); }
  bool isSuccess() const override { return !exception() && its_.inner->isSuccess(); }
  std::exception_ptr exception() const override {
    const std::lock_guard lock(mutex_);
    return exception_ ? exception_ : its_.inner->exception();
  }
  int sourceRank() const override { return its_.call.root; }
  void abort() override {
    aborted_ = true;
    its_.inner->abort();
  }
  bool wait(milliseconds timeout) override {
    if (!settled_) timeout = await_other_side(timeout);
    if (differs_.exchange(false)) wait_for_any_end(timeout);  // The answer comes into the tensor.
    if (const auto error = exception()) std::rethrow_exception(error);
    return its_.inner->wait(timeout);
  }

 private:
  void wait_for_any_end(milliseconds timeout) {
    try {
      its_.inner->wait(timeout);
    } catch (const std::exception&) {  // What the caller gets is an earlier error.
    }
  }
  void settle(const std::string& finding) {
    differs_ = finding != kAgreed && finding != its_.signature;
    if (differs_)
      exception_ =
          mismatch_error(mismatch_of(its_.context->ranks_of_message(its_.call.root), finding));
    settled_ = true;
  }

  /// Whether the other side has told its finding, or this one has failed. `looks` where that is.
  bool settled(bool looks = false, bool late = false) {
    const std::lock_guard lock(mutex_);
    if (settled_) return true;
    try {
      at_store(*its_.context, its_.call, [this](c10d::Store& store) {
        // First: the finding of a receive before those from any may have come meanwhile.
        const bool to_any = !its_.any_key.empty() && store.check({its_.any_key});
        const std::string finding = store.get_to_str(its_.key);
        if (finding == its_.signature && !to_any) return;
        store.deleteKey(its_.key);
        settle(finding);
      });
      if (!settled_ && looks) expect_peer(late);
    } catch (...) {
      exception_ = std::current_exception();
      settled_ = true;
    }
    return settled_;
  }

  /// Gives what is left of the limit.
  milliseconds await_other_side(milliseconds limit) {
    const bool limited = limit.count() > 0;
    const auto deadline = steady_clock::now() + (limited ? limit : its_.context->timeout());
    Every look(milliseconds(50));
    for (PollPause pause;; pause.sleep()) {
      const auto rest = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
      const bool late = rest.count() <= 0;
      if (settled(late || look.due(), late && !limited) || its_.inner->exception())
        return limited ? std::max(rest, milliseconds(1)) : limit;
      if (late && limited)
        std::rethrow_exception(short_wait_error(*its_.context, its_.call, limit));
    }
  }

  /// Throws when the other side will not come, or is `late`.
  void expect_peer(bool late) {
    auto& context = *its_.context;
    const int peer = its_.call.root;
    if (aborted_ || context.has_told_end()) throw CommError(context.me() + " closed the group of a message");
    const auto left = context.told_end(peer);
    // Its call may have come since the last look for it: that is done once more.
    const bool had_left = std::exchange(peer_had_left_, left.has_value());
    if (!context.ended({peer}).empty()) fail(context.end_of({peer}));
    if (const auto failure = context.seen_failure()) fail(*failure, "the group has failed: ");
    if (left && had_left) fail(*left);
    if (!late) return;
    context.store().set(its_.key, kGivenUp);
    wait_for_any_end(milliseconds(1));  // Gloo breaks its connections: nothing comes any more.
    const char* call = its_.call.operation == Operation::send ? "receive" : "send";
    Failure absent = context.failure_of(peer, Failure::Kind::late);
    absent.text = c10::str(rank_list({peer}, context.names()), " did not call the ", call,
                           " within ", seconds_text(context.timeout()));
    fail(absent);
  }

  [[noreturn]] void fail(const Failure& why, const std::string& of_group = {}) const {
    auto& context = *its_.context;
    const std::string text =
        c10::str(describe(its_.call, context.names()), " with tag ", its_.tag, " in group '",
                 context.group(), "', but ", of_group, describe(why));
    context.tell_failed(text);
    std::rethrow_exception(failure_error(context.me() + " called " + text, why));
  }

  const Parts its_;
  std::atomic<bool> settled_{false}, differs_{false}, aborted_{false};
  bool peer_had_left_ = false;
};

}  // namespace

P2PChecks::WorkPtr P2PChecks::run(CallSignature call, std::vector<at::Tensor>& tensors, int tag,
                                  const Issue& issue) {
  const auto at_key = [&](auto request) { return at_store(*context_, call, request); };
  const bool sends = call.operation == Operation::send;
  const std::lock_guard lock(mutex_);
  const int sender = sends ? context_->rank() : call.root;
  const int receiver = sends ? call.root : context_->rank();
  const std::string any_key = c10::str("p2p/any/", receiver, "/", tag);
  if (call.operation == Operation::recv_any) {
    if (any_tags_.insert(tag).second) at_key([&](auto& store) { store.set(any_key, "1"); });
    return issue(tensors);
  }
  uint64_t& number = (sends ? sends_ : receives_)[{call.root, tag}];
  if ((!sends && any_tags_.contains(tag)) || !checks_.compares(number + 1)) return issue(tensors);
  call.sequence = ++number;
  ComparedWork::Parts parts{context_, call, tag, encode(call)};
  parts.key = c10::str("p2p/", sender, "/", receiver, "/", tag, "/", number);
  if (sends) parts.any_key = any_key;
  const auto put = [&](const std::string& expected, const std::string& word) {
    return at_key([&](auto& store) { return store.compareSet(parts.key, expected, word); });
  };
  const std::string found = put("", parts.signature);
  const bool is_first = found == parts.signature;
  const auto& names = context_->names();
  if (found == kGivenUp) {
    Failure failure = context_->failure_of(call.root, Failure::Kind::gave_up);
    failure.text = c10::str(rank_list({call.root}, names), " has given its ",
                            sends ? "receive" : "send", " up");
    throw_failure(describe(call, names) + ": ", failure);
  }
  const CallSignature other = decode(found);
  std::string difference =  // None for the first: of its own signature one half is empty.
      find_p2p_mismatch(sends ? call : other, sends ? other : call, tag, names, context_->group())
          .value_or("");
  std::exception_ptr refused;
  try {
    if (difference.empty()) parts.inner = issue(tensors);
  } catch (...) {
    refused = std::current_exception();
    difference = is_first ? kGivenUp : context_->me() + " failed: " + failure_text(refused);
  }
  if (!is_first || refused) put(found, difference.empty() ? kAgreed : difference);
  if (!is_first && difference.empty()) return parts.inner;
  if (!is_first) {
    const TensorSignature& fits = (sends ? other.outputs : other.inputs).at(0);
    std::vector<at::Tensor> unread{at::zeros(fits.shape, fits.dtype)};
    parts.inner = answers_.emplace_back(unread[0], issue(unread)).second;
  }
  if (refused) std::rethrow_exception(refused);
  return c10::make_intrusive<ComparedWork>(std::move(parts), difference);
}

}  // namespace lockstep
