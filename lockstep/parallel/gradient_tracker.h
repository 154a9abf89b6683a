#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/autograd/backward_hook.h"

namespace torch::distributed::autograd {
class DistAutogradContext;
}

namespace lockstep::detail {

using DistAutogradContext = std::shared_ptr<torch::distributed::autograd::DistAutogradContext>;

/// Of the backward that runs on this thread, from a hook of it. Null for one that is not of
/// distributed autograd.
DistAutogradContext context_of_this_backward();
/// Calls `change` with the gradient of the parameter of that name, which it may change or replace:
/// that in the context, where there is one, else grad(). A context has one from the moment at which
/// the parameter's hooks run. Throws UsageError where it has none.
void visit_gradient(const DistAutogradContext& context, const at::Tensor& parameter,
                    const std::string& name, const std::function<void(at::Tensor&)>& change);

/// From a hook of a backward: throws UsageError when it is one of distributed autograd, whose
/// gradients `what` does not find.
void refuse_distributed_autograd(const std::string& what);

/// Which gradients a GradientTracker can do with.
struct ArrivalRules {
  /// Gradients may come several times in a backward, as often as in the round before: then the last
  /// one counts. With `may_miss`: others are not taken, and are there at the round's end.
  bool may_repeat = false;
  bool may_miss = false;  ///< A round ends with its backward, whatever has come.
};

/// Sees the gradients of some parameters come: on the thread that runs backward, when one has been
/// added to its parameter, also an undefined one. A round is one gradient of each, in one backward
/// or in several. The virtual functions are called one at a time.
class GradientTracker {
 public:
  GradientTracker() = default;
  virtual ~GradientTracker() { let_go(); }
  GradientTracker(const GradientTracker&) = delete;
  GradientTracker& operator=(const GradientTracker&) = delete;

 protected:
  /// From now on of these, in place of those before.
  void track(std::vector<at::Tensor> parameters);
  /// Where the parameters have other nodes now that add their gradients, as after `set_data`, goes
  /// on with those.
  void refresh();
  /// Does so by itself within the backward, and tells of gradients of `others`.
  void watch(const std::vector<at::Tensor>& others);
  void set_rules(const ArrivalRules& rules);
  /// Indices of those that an open round lacks. Empty where none is open.
  std::vector<size_t> missing() const;
  /// Gives up the round.
  void forget();

  /// The first gradient of a backward has come, of the parameter `index`.
  virtual void on_backward(size_t index) {}
  /// A parameter that is watched only has got a gradient.
  virtual void on_other(size_t index) {}
  /// A parameter has a new node that adds its gradients, in a backward that has come to it.
  virtual void on_new_node(size_t index) {}
  /// The first gradient of a round. False: this backward's gradients are left alone.
  virtual bool begin_round() = 0;
  /// The gradient of this round is there.
  virtual void take(size_t index) = 0;
  /// All have been taken, or are missing.
  virtual void end_round() = 0;
  /// The parameter got a second gradient in a round: in the `same_backward`, or in a later one
  /// while others are `missing`. The round is given up. It is to throw.
  virtual void refuse_second(size_t index, bool same_backward,
                             const std::vector<size_t>& missing) = 0;

 private:
  class Hook;
  class Watch;
  static constexpr int64_t kNone = -1;
  /// A shared pointer, of which kind depends on LibTorch's version.
  using NodePtr =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Tracked {
    at::Tensor parameter;
    NodePtr accumulator;  ///< The parameter holds it weakly.
    uintptr_t hook = 0;
    int64_t backward = kNone;  ///< The last one in which a gradient came.
    int64_t times = 0;         ///< In this round.
    int64_t due = 1;           ///< In a round, before it is taken. 0: not known, or never.
    /// Of this gradient already, from a node that was without a hook. LibTorch's engine runs the
    /// hook that it has got meanwhile, and our walk does not.
    bool told = false;
  };

  void on_gradient(size_t index);
  void on_end(int64_t backward);
  void on_accumulation(size_t index);
  bool refresh(size_t index);
  void give_up(size_t index, bool same_backward);
  void let_go();

  ArrivalRules rules_;
  std::mutex mutex_;
  std::vector<Tracked> all_;
  std::vector<at::Tensor> watched_;  ///< Those of `all_`, and the others.
  int64_t backward_ = kNone;         ///< The last one.
  size_t awaited_ = 0;               ///< In an open round.
  bool open_ = false;
  bool ends_ = false;  ///< `on_end` will be called for this backward.
};

}  // namespace lockstep::detail
