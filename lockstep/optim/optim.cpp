#include "lockstep/optim/optim.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <unordered_set>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/optim/torch_optimizer.h"

namespace lockstep {
namespace {

void require(bool holds, const std::string& optimizer, const std::string& what, double value) {
  if (!holds) throw UsageError(optimizer + ": " + what + ", got " + std::to_string(value));
}

void check_options(const std::string& name, const OptimizerOptions& o) {
  const auto fraction = [](double value) { return value >= 0 && value < 1; };
  require(o.lr >= 0 && std::isfinite(o.lr), name, "the learning rate must be 0 or more", o.lr);
  require(o.momentum >= 0, name, "momentum must be 0 or more", o.momentum);
  require(fraction(o.beta1), name, "beta1 must be in [0, 1)", o.beta1);
  require(fraction(o.beta2), name, "beta2 must be in [0, 1)", o.beta2);
  require(o.alpha >= 0, name, "alpha must be 0 or more", o.alpha);
  require(o.lr_decay >= 0, name, "lr_decay must be 0 or more", o.lr_decay);
  require(o.eps.value_or(0) >= 0, name, "eps must be 0 or more", o.eps.value_or(0));
  require(o.weight_decay.value_or(0) >= 0, name, "weight decay must be 0 or more",
          o.weight_decay.value_or(0));
  if (o.nesterov && (o.momentum <= 0 || o.dampening != 0)) {
    throw UsageError(name + ": nesterov needs a momentum above 0 and no dampening");
  }
}

}  // namespace

void Optimizer::step_scaled(const StepScale& scale) {
  if (scale.found_inf.defined() && scale.found_inf.item<double>() != 0) return;
  if (scale.grad_scale.defined()) {
    const c10::AutoGradMode no_grad(false);
    const at::Tensor factor = scale.grad_scale.reshape({});
    for (const at::Tensor& parameter : parameters()) {
      const at::Tensor& gradient = parameter.grad();
      if (gradient.defined()) gradient.div_(factor.to(gradient.device()));
    }
  }
  step();
}

std::vector<std::string> optimizer_names() {
  return {"sgd", "adam", "adamw", "rmsprop", "adagrad", "lbfgs"};
}

std::vector<std::string> line_search_names() {
  return {"strong_wolfe"};
}

std::unique_ptr<Optimizer> make_optimizer(const std::string& name,
                                          std::vector<at::Tensor> parameters,
                                          const OptimizerOptions& options) {
  default_learning_rate(name);  // Refuses an unknown name.
  check_options(name, options);
  if (parameters.empty()) throw UsageError(name + ": there are no parameters to optimize");
  parameters = unique_parameters(parameters);
  if (name == "sgd") return std::make_unique<Sgd>(std::move(parameters), options);
  if (name.starts_with("adam")) return make_fused_adam(name, std::move(parameters), options);
  if (name == "lbfgs") return make_lbfgs(std::move(parameters), options);
  return make_torch_optimizer(name, std::move(parameters), options);
}

double default_learning_rate(const std::string& name) {
  if (name == "sgd" || name == "adam" || name == "adamw") return 1e-3;
  if (name == "rmsprop" || name == "adagrad") return 1e-2;
  if (name == "lbfgs") return 1;
  throw UsageError(unknown_word("optimizer", name, optimizer_names()));
}

std::vector<at::Tensor> unique_parameters(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> unique;
  unique.reserve(parameters.size());
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters) {
    const bool is_new = seen.insert(parameter.unsafeGetTensorImpl()).second;
    if (is_new || !parameter.defined()) unique.push_back(parameter);
  }
  return unique;
}

void zero_grad(const std::vector<at::Tensor>& parameters, bool set_to_none) {
  std::vector<at::Tensor> kept;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    if (set_to_none) {
      parameter.mutable_grad().reset();
    } else {
      kept.push_back(parameter.grad());
    }
  }
  if (kept.empty()) return;
  const c10::AutoGradMode no_grad(false);
  at::_foreach_zero_(flat_runs(kept));
}

}  // namespace lockstep
