#include "lockstep/optim/torch_optimizer.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optimizer_state.h"

namespace lockstep {
namespace {

constexpr const char* kExpAvg = "exp_avg";
constexpr const char* kExpAvgSq = "exp_avg_sq";
constexpr const char* kMaxExpAvgSq = "max_exp_avg_sq";

/// What the kernels go through: memory in order.
at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : head(tensor, tensor.numel());
}

/// The gradient in the order of the parameter's elements; a copy where it has another.
at::Tensor ordered_gradient(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (is_dense(gradient) && same_order(gradient, parameter)) return in_memory_order(gradient);
  return in_memory_order(copy_like(gradient, parameter));
}

at::Tensor step_tensor(int64_t steps, const at::Tensor& parameter) {
  const auto dtype = parameter.is_cpu() ? at::kLong : at::kFloat;
  return at::full({1}, steps, parameter.options().dtype(dtype).requires_grad(false));
}

std::optional<at::Tensor> on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return std::nullopt;
  return tensor.to(device, at::kFloat);
}

class FusedAdam : public Optimizer {
 public:
  FusedAdam(std::string name, std::vector<at::Tensor> parameters, const OptimizerOptions& options)
      : name_(std::move(name)),
        parameters_(std::move(parameters)),
        moments_(parameters_.size()),
        lr_(options.lr),
        beta1_(options.beta1),
        beta2_(options.beta2),
        eps_(options.eps.value_or(1e-8)),
        weight_decay_(options.weight_decay.value_or(name_ == "adamw" ? 0.01 : 0)),
        amsgrad_(options.amsgrad) {
    for (auto& members : by_kind(parameters_)) groups_.emplace_back().members = std::move(members);
  }

  /// Throws UsageError for a sparse gradient, as torch::optim does.
  void step() override { step_scaled({}); }
  void step_scaled(const StepScale& scale) override {
    const c10::AutoGradMode no_grad(false);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& gradient = parameters_[i].grad();
      if (!gradient.defined() || gradient.layout() == at::kStrided) continue;
      throw UsageError(name_ + ": the gradient of parameter " + std::to_string(i) +
                           " is sparse, which this optimizer does not take",
                       "use sgd, or make the gradient dense (sparse=false of an embedding)");
    }
    // On the CPU it costs nothing to look; a CUDA device looks by itself, without the host's
    // waiting.
    const at::Tensor& found = scale.found_inf;
    if (found.defined() && found.is_cpu() && found.item<double>() != 0) return;
    for (Group& group : groups_) {
      group.clear();
      for (const size_t index : group.members) {
        if (parameters_[index].grad().defined()) add_to(group, index);
      }
      if (!group.parameters.empty()) run(group, scale);
    }
  }
  void set_lr(double lr) override { lr_ = lr; }
  double lr() const override { return lr_; }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  bool takes_grad_scale() const override { return true; }
  StateDict state() const override {
    StateDict state;
    for (size_t i = 0; i < moments_.size(); ++i) {
      const Moments& moments = moments_[i];
      if (!moments.exp_avg.defined()) continue;
      state.emplace_back(state_key(kStep, i), moments.step.to(at::kCPU, at::kLong));
      state.emplace_back(state_key(kExpAvg, i), moments.exp_avg);
      state.emplace_back(state_key(kExpAvgSq, i), moments.exp_avg_sq);
      if (moments.max_exp_avg_sq.defined()) {
        state.emplace_back(state_key(kMaxExpAvgSq, i), moments.max_exp_avg_sq);
      }
    }
    return state;
  }
  void load_state(const StateDict& state) override {
    std::vector<Moments> loaded(parameters_.size());
    const auto all =
        read_state(name_, state, {kStep, kExpAvg, kExpAvgSq, kMaxExpAvgSq}, parameters_);
    const bool has_maxima = has_field(all, kMaxExpAvgSq);
    for (const auto& [index, given] : all) {
      const at::Tensor& parameter = parameters_[index];
      Moments& moments = loaded[index];
      moments.step = step_tensor(required(name_, given, kStep, index).item<int64_t>(), parameter);
      moments.exp_avg = copy_like(required(name_, given, kExpAvg, index), parameter);
      moments.exp_avg_sq = copy_like(required(name_, given, kExpAvgSq, index), parameter);
      if (!amsgrad_) continue;
      // Of a run without amsgrad they begin as in a fresh optimizer.
      moments.max_exp_avg_sq =
          has_maxima ? copy_like(required(name_, given, kMaxExpAvgSq, index), parameter)
                     : at::zeros_like(parameter.detach());
    }
    moments_ = std::move(loaded);
  }
  const std::string& name() const override { return name_; }
  bool is_elementwise() const override { return true; }

 private:
  /// Of one parameter. Undefined tensors until its first gradient. In the parameter's layout.
  struct Moments {
    /// One number: int64 on the CPU; float32 on a CUDA device, as its kernel wants it.
    at::Tensor step;
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
    at::Tensor max_exp_avg_sq;  ///< With amsgrad.
  };
  /// What one call of a kernel takes: parameters of one device and dtype.
  struct Group {
    std::vector<size_t> members;
    /// Of one step; kept so that a step allocates nothing.
    std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
    void clear() {
      for (auto* list :
           {&parameters, &gradients, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs, &steps}) {
        list->clear();
      }
    }
  };

  Moments fresh_moments(size_t index) const {
    const at::Tensor parameter = parameters_[index].detach();
    Moments moments;
    moments.step = step_tensor(0, parameter);
    moments.exp_avg = at::zeros_like(parameter);
    moments.exp_avg_sq = at::zeros_like(parameter);
    if (amsgrad_) moments.max_exp_avg_sq = at::zeros_like(parameter);
    return moments;
  }
  void add_to(Group& group, size_t index) {
    const at::Tensor& parameter = parameters_[index];
    if (!is_dense(parameter) || !parameter.is_floating_point())
      throw UsageError(name_ + ": parameter " + std::to_string(index) + ", " +
                           c10::str(parameter.sizes()) + " of " +
                           c10::toString(parameter.scalar_type()) +
                           ", is complex or not dense in memory",
                       "train its real and imaginary part, or contiguous() of it");
    at::Tensor gradient = ordered_gradient(parameter.grad(), parameter);
    Moments& moments = moments_[index];
    if (!moments.exp_avg.defined()) moments = fresh_moments(index);
    if (parameter.is_cpu()) ++*moments.step.mutable_data_ptr<int64_t>();
    group.parameters.push_back(in_memory_order(parameter));
    group.gradients.push_back(std::move(gradient));
    group.exp_avgs.push_back(in_memory_order(moments.exp_avg));
    group.exp_avg_sqs.push_back(in_memory_order(moments.exp_avg_sq));
    if (amsgrad_) group.max_exp_avg_sqs.push_back(in_memory_order(moments.max_exp_avg_sq));
    group.steps.push_back(moments.step);
  }
  void run(Group& group, const StepScale& scale) {
    const c10::Device device = group.parameters.front().device();
    const auto grad_scale = on_device(scale.grad_scale, device);
    const auto found_inf = on_device(scale.found_inf, device);
    const auto call = [&](const auto& kernel) {
      kernel(group.parameters, group.gradients, group.exp_avgs, group.exp_avg_sqs,
             group.max_exp_avg_sqs, group.steps, lr_, beta1_, beta2_, weight_decay_, eps_, amsgrad_,
             /*maximize=*/false, grad_scale, found_inf);
    };
    {
      // Straight to the kernel; versions are counted here instead.
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      if (!device.is_cpu()) at::_foreach_add_(group.steps, 1);
      if (name_ == "adamw") {
        call([](const auto&... all) { at::_fused_adamw_(all...); });
      } else {
        call([](const auto&... all) { at::_fused_adam_(all...); });
      }
      // A step that found_inf held back does not count.
      if (!device.is_cpu() && found_inf) {
        at::_foreach_sub_(group.steps,
                          std::vector<at::Tensor>(group.steps.size(), found_inf->reshape({1})));
      }
    }
    for (const size_t index : group.members) {
      const at::Tensor& parameter = parameters_[index];
      if (parameter.grad().defined()) parameter.unsafeGetTensorImpl()->bump_version();
    }
    group.clear();
  }

  std::string name_;
  std::vector<at::Tensor> parameters_;
  std::vector<Moments> moments_;
  std::vector<Group> groups_;
  double lr_;
  double beta1_;
  double beta2_;
  double eps_;
  double weight_decay_;
  bool amsgrad_;
};

}  // namespace

std::unique_ptr<Optimizer> make_fused_adam(const std::string& name,
                                           std::vector<at::Tensor> parameters,
                                           const OptimizerOptions& options) {
  return std::make_unique<FusedAdam>(name, std::move(parameters), options);
}

}  // namespace lockstep
