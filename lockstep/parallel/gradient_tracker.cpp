#include "lockstep/parallel/gradient_tracker.h"

#include <torch/csrc/distributed/autograd/context/context.h>

#include <memory>

namespace lockstep::detail {
namespace {

using torch::autograd::variable_list;

/// Such a backward has an end on another thread, when others have sent their gradients.
bool in_distributed_autograd() {
  return torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr() != nullptr;
}

}  // namespace

class GradientTracker::Hook : public PlainPostHook {
 public:
  Hook(GradientTracker& tracker, size_t index) : tracker_(tracker), index_(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    tracker_.on_gradient(index_);
    return outputs;
  }

 private:
  GradientTracker& tracker_;
  size_t index_;
};

void GradientTracker::track(const std::vector<at::Tensor>& parameters) {
  let_go();
  all_.resize(parameters.size());
  for (size_t i = 0; i < all_.size(); ++i) {
    all_[i].accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
    all_[i].hook = all_[i].accumulator->add_post_hook(std::make_unique<Hook>(*this, i));
  }
  learned_ = false;
  forget();
}

void GradientTracker::let_go() {
  for (const Tracked& its : all_) its.accumulator->del_post_hook(its.hook);
  all_.clear();
}

std::vector<size_t> GradientTracker::missing() const {
  std::vector<size_t> missing;
  for (size_t i = 0; open_ && i < all_.size(); ++i) {
    if (!all_[i].arrived) missing.push_back(i);
  }
  return missing;
}

void GradientTracker::forget() {
  for (Tracked& its : all_) its.arrived = its.taken = false;
  waiting_.clear();
  awaited_ = all_.size();
  open_ = false;
}

/// Whether no further gradient of the parameter is awaited in this backward.
bool GradientTracker::is_whole(const Tracked& its) const {
  if (!rules_.can_wait || in_distributed_autograd()) return true;
  return learned_ && its.arrivals >= its.expected;
}

void GradientTracker::on_gradient(size_t index) {
  // Distributed autograd runs a backward on several threads where gradients come from others.
  const std::lock_guard lock(mutex_);
  const int64_t backward = current_backward();
  if (std::exchange(backward_, backward) != backward) {
    ends_ = false;
    receiver_.on_backward(index);
  }
  Tracked& its = all_[index];
  const bool again = its.backward == backward;
  if (!again) its.arrivals = 0;
  if (again && its.taken && !rules_.may_repeat) refuse(index, /*same_backward=*/true);
  if (!open_) {
    if (!receiver_.begin_round()) return;
    forget();
    open_ = true;
  }
  if (its.arrived && !again) refuse(index, /*same_backward=*/false);
  its.backward = backward;
  its.arrived = true;
  ++its.arrivals;
  const bool whole = is_whole(its);
  if ((!whole || rules_.may_miss) && !std::exchange(ends_, true))
    after_backward([this, backward] { on_end(backward); });
  if (whole && !its.taken) return take(index);
  if (its.arrivals == 1) waiting_.push_back(index);
}

void GradientTracker::refuse(size_t index, bool same_backward) {
  const std::vector<size_t> lacking = missing();
  forget();
  receiver_.refuse_second(index, same_backward, lacking);
}

void GradientTracker::take(size_t index) {
  all_[index].taken = true;
  --awaited_;
  try {
    receiver_.take(index);
    if (awaited_ > 0 || rules_.may_miss) return;
    open_ = false;
    receiver_.end_round();
  } catch (...) {
    // What is missing now is not the user's fault.
    forget();
    throw;
  }
}

/// Backward has run all of its nodes: no further gradient of those that have come is to come.
void GradientTracker::on_end(int64_t backward) {
  const std::lock_guard lock(mutex_);
  if (backward_ != backward || !open_) return;
  for (const size_t index : std::exchange(waiting_, {})) {
    Tracked& its = all_[index];
    if (!learned_) its.expected = its.arrivals;
    if (!its.taken) take(index);
  }
  if (!open_) learned_ = true;
  if (!open_ || !rules_.may_miss) return;
  open_ = false;
  receiver_.end_round();
}

}  // namespace lockstep::detail
