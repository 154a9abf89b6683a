#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/state_dict.h"

namespace lockstep {

struct OptimizerOptions {
  double lr = 0.01;       ///< See default_learning_rate for what PyTorch takes.
  double momentum = 0;    ///< sgd, rmsprop.
  bool nesterov = false;  ///< sgd; needs momentum and no dampening.
  double dampening = 0;   ///< sgd.
  double beta1 = 0.9;     ///< adam, adamw.
  double beta2 = 0.999;   ///< adam, adamw.
  double alpha = 0.99;    ///< rmsprop.
  bool amsgrad = false;   ///< adam, adamw.
  bool centered = false;  ///< rmsprop.
  double lr_decay = 0;    ///< adagrad.
  /// L2 added to the gradient; for adamw decoupled. None is PyTorch's: 0, for adamw 0.01.
  std::optional<double> weight_decay = {};
  /// adam, adamw, rmsprop, adagrad. None is PyTorch's: 1e-8, for adagrad 1e-10.
  std::optional<double> eps = {};
  int64_t max_iter = 20;            ///< lbfgs: iterations of a step, as in PyTorch.
  int64_t history_size = 100;       ///< lbfgs: of iterations. Each costs two copies of the model.
  std::string line_search_fn = {};  ///< lbfgs: strong_wolfe, or empty: each iteration moves by lr.
};

/// What a gradient scaler knows when it asks for a step, as torch.amp.GradScaler tells a fused
/// optimizer in Python.
struct StepScale {
  /// One number, by which the gradients are divided; undefined: they are not scaled.
  at::Tensor grad_scale;
  /// One number; not 0 when a gradient is infinite or NaN: then nothing changes, no count either.
  /// Undefined: none is.
  at::Tensor found_inf;
};

/// Drops the gradients, computes new ones from the parameters as they are now, and gives the loss.
using LossClosure = std::function<double()>;

/// A step from gradients to parameters. One thread at a time.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Updates every parameter that has a gradient. Makes no autograd graph.
  virtual void step() = 0;
  /// The same for scaled gradients. What the gradients are after it is not said: drop them. Divides
  /// them and calls `step`, unless it is overridden.
  virtual void step_scaled(const StepScale& scale);
  /// Whether a step evaluates the loss several times, so that only `step_with` can make it: lbfgs.
  virtual bool needs_closure() const { return false; }
  /// Python's step(closure). Gives the loss that the closure gave first. What it throws leaves the
  /// step, and parameters then have values of the middle of it.
  virtual double step_with(const LossClosure& closure) {
    const double loss = closure();
    step();
    return loss;
  }
  virtual void set_lr(double lr) = 0;
  virtual double lr() const = 0;
  /// The tensors that a step updates, in the order of state()'s indices.
  virtual const std::vector<at::Tensor>& parameters() const = 0;
  /// Whether step_scaled divides by the scale within the update, as Python's fused optimizers do.
  /// Else a gradient scaler divides the gradients before.
  virtual bool takes_grad_scale() const { return false; }
  /// Everything needed to go on with the same bits, except for the options. Tensors are under
  /// "NAME.parameter-index"; counts are int64 tensors of one element. The tensors are the
  /// optimizer's own: copy what must outlive the next step. A parameter that never had a gradient
  /// has no entries.
  virtual StateDict state() const = 0;
  /// Replaces the state by a copy of what state() gave. Parameters without entries become as in a
  /// fresh optimizer: an empty state makes all of it fresh. The options may differ. A buffer that
  /// these do not use (momentum, `centered`, `amsgrad`) is dropped. One that they use and that the
  /// state has of no parameter begins as in a fresh optimizer. Throws CheckpointError naming what
  /// is missing, unknown or of another shape, and then changes nothing.
  virtual void load_state(const StateDict& state) = 0;
  virtual const std::string& name() const = 0;
  /// Whether each element is updated from its own value, gradient and state alone. Then a parameter
  /// may be cut into parts that different ranks update (ZeRO, FSDP), to the same values. False for
  /// one that looks at whole parameters, such as by their norms. True for all of make_optimizer's
  /// but lbfgs.
  virtual bool is_elementwise() const { return false; }
};

/// Makes an optimizer of some tensors: a module's own parameters, a strategy's shards of them, or
/// float32 copies.
using OptimizerFactory =
    std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor> parameters)>;

/// The optimizers:
/// - sgd: our own, with the bits of torch.optim.SGD, and fused kernels where those give them.
/// - adam, adamw: fused kernels, which give the bits of Python's `fused=True`. Their step throws
///   UsageError for a gradient of a parameter that is complex or not dense in memory.
/// - rmsprop, adagrad: torch::optim's.
/// - lbfgs: torch::optim's. Its step needs a closure (`step_with`).
///
/// Parameters that need no gradient are allowed. One that is there twice counts once: see
/// unique_parameters. Throws UsageError for an unknown name (with the nearest), for no parameters
/// and for options out of range.
std::unique_ptr<Optimizer> make_optimizer(const std::string& name,
                                          std::vector<at::Tensor> parameters,
                                          const OptimizerOptions& options);
std::vector<std::string> optimizer_names();
/// What OptimizerOptions::line_search_fn can be, besides empty.
std::vector<std::string> line_search_names();
/// PyTorch's: 0.001 for sgd, adam and adamw, 0.01 for rmsprop and adagrad, 1 for lbfgs.
double default_learning_rate(const std::string& name);

/// `parameters` without repetitions, in the order of their first places, as Python's
/// `module.parameters()` gives them. C++'s has a weight that several layers share once for each of
/// them. make_optimizer, clip_grad_norm and the strategies count it once. Optimizers of
/// torch::optim step it once for each place: give them this list.
std::vector<at::Tensor> unique_parameters(const std::vector<at::Tensor>& parameters);

/// Drops all gradients without detaching them, so that views of DDP's buckets stay valid. The next
/// backward then stores gradients instead of adding to zeros. This is also the fastest way: nothing
/// is written. With `set_to_none` false they stay and become 0. That takes one pass over each
/// stretch of memory in which they lie side by side, such as a bucket.
void zero_grad(const std::vector<at::Tensor>& parameters, bool set_to_none = true);

/// Scales the gradients so that their total 2-norm is at most `max_norm`. Returns the norm before,
/// with the bits of torch.nn.utils.clip_grad_norm_. When there is no gradient it returns 0, and
/// warns once: under zero2 and fsdp they lie in shards. Of float16
/// gradients it is computed in float32, where Python's overflows. Buckets are scaled in one pass
/// each, and not at all where the norm is small enough. Sparse gradients are coalesced. A norm that
/// is NaN or infinite is returned (and has spoilt the gradients, as in Python).
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm);

struct ScheduleOptions {
  std::string name = "constant";  ///< constant, step, cosine, linear.
  /// The rate grows linearly over the first steps: lr/warmup_steps at step 0, lr at step
  /// warmup_steps - 1. The schedule proper starts after them.
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  ///< cosine, linear: where the rate reaches `min_lr`, warm-up included.
  int64_t step_size = 0;    ///< step: every so many steps the rate is multiplied by gamma.
  double gamma = 0.1;       ///< step. PyTorch's default.
  double min_lr = 0;        ///< cosine, linear: the rate at `total_steps` and after.
};

/// The learning rate at optimizer step `step` (from 0), for a base rate. It is a pure function, so
/// that resuming needs no state. The closed forms of torch.optim.lr_scheduler's StepLR,
/// CosineAnnealingLR and LinearLR (Python's own recurrences differ from those by rounding).
/// Throws UsageError for an unknown name (with the nearest) and for missing or negative lengths.
double scheduled_lr(const ScheduleOptions& options, double base_lr, int64_t step);
std::vector<std::string> schedule_names();

}  // namespace lockstep
