#include "lockstep/parallel/gradient_tracker.h"

#include <torch/csrc/distributed/autograd/context/context.h>

#include <memory>

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

namespace native = torch::distributed::autograd;
using torch::autograd::PostAccumulateGradHook;
using torch::autograd::variable_list;

/// A tensor, by a reference of which the kind depends on LibTorch's version.
template <class Hook, class Tensor>
Tensor argument_of(void (Hook::*)(Tensor));
using Accumulated = decltype(argument_of(&PostAccumulateGradHook::operator()));

}  // namespace

class GradientTracker::Hook : public PlainPostHook {
 public:
  Hook(GradientTracker& tracker, size_t index) : tracker_(tracker), index_(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (!std::exchange(tracker_.all_[index_].told, false)) tracker_.on_gradient(index_);
    return outputs;
  }

 private:
  GradientTracker& tracker_;
  size_t index_;
};

/// A tensor has one such hook. So each keeps the one before it.
class GradientTracker::Watch : public PlainAccumulateHook {
 public:
  static void add(GradientTracker& tracker, const at::Tensor& parameter, size_t index) {
    torch::autograd::impl::materialize_autograd_meta(parameter);
    auto& place = torch::autograd::impl::post_acc_grad_hooks(parameter);
    place = std::make_unique<Watch>(tracker, index, std::move(place));
  }
  static void remove(const GradientTracker& tracker, const at::Tensor& parameter) {
    auto* place = &torch::autograd::impl::post_acc_grad_hooks(parameter);
    while (auto* watch = dynamic_cast<Watch*>(place->get())) {
      if (&watch->tracker_ == &tracker) {
        *place = std::move(watch->before_);
        return;
      }
      place = &watch->before_;
    }
  }

  Watch(GradientTracker& tracker, size_t index, std::unique_ptr<PostAccumulateGradHook> before)
      : tracker_(tracker), index_(index), before_(std::move(before)) {}
  void operator()(Accumulated tensor) override {
    tracker_.on_accumulation(index_);
    if (before_) (*before_)(tensor);
  }

 private:
  GradientTracker& tracker_;
  size_t index_;
  std::unique_ptr<PostAccumulateGradHook> before_;
};

void GradientTracker::track(std::vector<at::Tensor> parameters) {
  let_go();
  all_.resize(parameters.size());
  for (size_t i = 0; i < all_.size(); ++i) {
    all_[i].parameter = std::move(parameters[i]);
    refresh(i);
  }
  forget();
}

bool GradientTracker::refresh(size_t index) {
  Tracked& its = all_[index];
  // A parameter that was frozen meanwhile has none.
  auto now = torch::autograd::impl::grad_accumulator(its.parameter);
  if (!now || now == its.accumulator) return false;
  if (its.accumulator) its.accumulator->del_post_hook(its.hook);
  its.accumulator = std::move(now);
  its.hook = its.accumulator->add_post_hook(std::make_unique<Hook>(*this, index));
  return true;
}

void GradientTracker::refresh() {
  for (size_t i = 0; i < all_.size(); ++i) refresh(i);
}

void GradientTracker::watch(const std::vector<at::Tensor>& others) {
  for (const Tracked& its : all_) watched_.push_back(its.parameter);
  watched_.insert(watched_.end(), others.begin(), others.end());
  for (size_t i = 0; i < watched_.size(); ++i) Watch::add(*this, watched_[i], i);
}

void GradientTracker::on_accumulation(size_t index) {
  if (index >= all_.size()) return on_other(index - all_.size());
  all_[index].told = refresh(index);
  if (!all_[index].told) return;
  on_new_node(index);
  on_gradient(index);
}

void GradientTracker::let_go() {
  for (const at::Tensor& parameter : watched_) Watch::remove(*this, parameter);
  for (const Tracked& its : all_) its.accumulator->del_post_hook(its.hook);
  watched_.clear();
  all_.clear();
}

void GradientTracker::set_rules(const ArrivalRules& rules) {
  rules_ = rules;
  for (Tracked& its : all_) its.due = rules.may_repeat ? 0 : 1;
}

std::vector<size_t> GradientTracker::missing() const {
  std::vector<size_t> missing;
  for (size_t i = 0; open_ && i < all_.size(); ++i) {
    if (all_[i].times == 0) missing.push_back(i);
  }
  return missing;
}

void GradientTracker::forget() {
  for (Tracked& its : all_) its.times = 0;
  awaited_ = all_.size();
  open_ = false;
}

void GradientTracker::on_gradient(size_t index) {
  // Distributed autograd runs a backward on several threads where gradients come from others.
  const std::lock_guard lock(mutex_);
  const int64_t backward = current_backward();
  if (std::exchange(backward_, backward) != backward) {
    ends_ = false;
    on_backward(index);
  }
  Tracked& its = all_[index];
  const bool again = its.backward == backward;
  if (again && its.times > 0 && !rules_.may_repeat) give_up(index, /*same_backward=*/true);
  if (!open_) {
    if (!begin_round()) return;
    forget();
    open_ = true;
  }
  if (its.times > 0 && !again) give_up(index, /*same_backward=*/false);
  its.backward = backward;
  if (rules_.may_miss && !std::exchange(ends_, true))
    after_backward([this, backward] { on_end(backward); });
  ++its.times;
  if (its.due > 0 && its.times > its.due) give_up(index, /*same_backward=*/true);
  if (its.times != its.due) return;
  --awaited_;
  try {
    take(index);
    if (awaited_ > 0 || rules_.may_miss) return;
    open_ = false;
    end_round();
  } catch (...) {
    // What is missing now is not the user's fault.
    forget();
    throw;
  }
}

void GradientTracker::give_up(size_t index, bool same_backward) {
  const std::vector<size_t> lacking = missing();
  forget();
  refuse_second(index, same_backward, lacking);
}

/// Backward has run all of its nodes.
void GradientTracker::on_end(int64_t backward) {
  const std::lock_guard lock(mutex_);
  if (backward_ != backward || !open_) return;
  open_ = false;
  if (rules_.may_repeat) {
    for (Tracked& its : all_) its.due = its.times;
  }
  end_round();
}

DistAutogradContext context_of_this_backward() {
  return native::ThreadLocalDistAutogradContext::getContextPtr();
}

void visit_gradient(const DistAutogradContext& context, const at::Tensor& parameter,
                    const std::string& name, const std::function<void(at::Tensor&)>& change) {
  if (!context) return change(parameter.mutable_grad());
  bool found = false;
  try {
    context->runGradCallbackForVariable(parameter, [&](at::Tensor& gradient) {
      found = true;
      change(gradient);
      return true;
    });
  } catch (const c10::Error&) {
    if (found) throw;
    throw UsageError("a backward of distributed autograd gave " + name + " no gradient",
                     "in a context every parameter must take part in the loss");
  }
}

void refuse_distributed_autograd(const std::string& what) {
  if (!context_of_this_backward()) return;
  throw UsageError(what + ": its gradients lie in an rpc::AutogradContext, where it does not look",
                   "call backward of the loss itself, or take DistributedDataParallel");
}

}  // namespace lockstep::detail
