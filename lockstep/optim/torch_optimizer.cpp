#include "lockstep/optim/torch_optimizer.h"

#include <ATen/Functions.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <map>

#include "lockstep/optim/optimizer_state.h"
#include "lockstep/optim/unscale.h"

namespace lockstep {
namespace {

/// The fields of a torch::optim state by name, so that one adapter serves all optimizers.
template <class State>
struct TensorField {
  const char* name;
  at::Tensor& (State::*get)() noexcept;
  bool optional;  ///< Kept only with some options.
};

template <class State>
struct Layout;

template <class State>
std::vector<TensorField<State>> adam_layout() {
  return {{"exp_avg", &State::exp_avg, false},
          {"exp_avg_sq", &State::exp_avg_sq, false},
          {"max_exp_avg_sq", &State::max_exp_avg_sq, true}};
}

template <>
struct Layout<torch::optim::AdamParamState> {
  static auto fields() { return adam_layout<torch::optim::AdamParamState>(); }
};

template <>
struct Layout<torch::optim::AdamWParamState> {
  static auto fields() { return adam_layout<torch::optim::AdamWParamState>(); }
};

template <>
struct Layout<torch::optim::RMSpropParamState> {
  using State = torch::optim::RMSpropParamState;
  static std::vector<TensorField<State>> fields() {
    return {{"square_avg", &State::square_avg, false},
            {"momentum_buffer", &State::momentum_buffer, true},
            {"grad_avg", &State::grad_avg, true}};
  }
};

template <>
struct Layout<torch::optim::AdagradParamState> {
  using State = torch::optim::AdagradParamState;
  static std::vector<TensorField<State>> fields() { return {{"sum", &State::sum, false}}; }
};

constexpr const char* kStep = "step";

template <class Torch, class State>
class TorchOptimizer : public Optimizer {
 public:
  template <class Options>
  TorchOptimizer(std::string name, std::vector<at::Tensor> parameters, const Options& options)
      : name_(std::move(name)), parameters_(parameters), torch_(std::move(parameters), options) {}

  void step() override { torch_.step(); }
  void step_scaled(const StepScale& scale) override {
    if (unscale_gradients(parameters_, scale)) step();
  }
  void set_lr(double lr) override { torch_.param_groups()[0].options().set_lr(lr); }
  double lr() const override { return torch_.param_groups()[0].options().get_lr(); }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  const std::string& name() const override { return name_; }
  bool is_elementwise() const override { return true; }

  OptimizerState state() const override {
    OptimizerState out;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto found = torch_.state().find(key(i));
      if (found == torch_.state().end()) continue;
      auto& state = static_cast<State&>(*found->second);
      out.emplace_back(state_key(kStep, i), at::full({1}, state.step(), at::kLong));
      for (const auto& field : Layout<State>::fields()) {
        const at::Tensor& tensor = (state.*field.get)();
        if (tensor.defined()) out.emplace_back(state_key(field.name, i), tensor);
      }
    }
    return out;
  }

  void load_state(const OptimizerState& state) override {
    std::vector<StateField> known{{kStep, StateKind::count}};
    for (const auto& field : Layout<State>::fields()) {
      known.push_back({field.name, StateKind::like_parameter});
    }
    std::map<size_t, std::map<std::string, at::Tensor>> by_index;
    for (StateEntry& entry : read_state(name_, state, known, parameters_)) {
      by_index[entry.index][entry.name] = entry.tensor;
    }
    std::map<size_t, std::unique_ptr<State>> loaded;
    for (const auto& [index, tensors] : by_index) loaded[index] = make_state(index, tensors);
    torch_.state().clear();
    for (auto& [index, item] : loaded) torch_.state()[key(index)] = std::move(item);
  }

 private:
  void* key(size_t index) const { return parameters_[index].unsafeGetTensorImpl(); }

  const at::Tensor& require(const std::map<std::string, at::Tensor>& tensors,
                            const std::string& field, size_t index) const {
    const auto found = tensors.find(field);
    if (found != tensors.end()) return found->second;
    throw CheckpointError(name_ + ": the optimizer state lacks '" + state_key(field, index) + "'",
                          "the checkpoint is damaged or of another optimizer");
  }

  std::unique_ptr<State> make_state(size_t index,
                                    const std::map<std::string, at::Tensor>& tensors) const {
    auto state = std::make_unique<State>();
    state->step(require(tensors, kStep, index).template item<int64_t>());
    for (const auto& field : Layout<State>::fields()) {
      if (field.optional && !tensors.contains(field.name)) continue;
      (state.get()->*field.get)() =
          copy_like(require(tensors, field.name, index), parameters_[index]);
    }
    return state;
  }

  std::string name_;
  std::vector<at::Tensor> parameters_;
  mutable Torch torch_;  ///< Its const access to state is not const all the way.
};

template <class Options>
Options adam_options(const OptimizerOptions& o, double weight_decay) {
  return Options(o.lr)
      .betas({o.beta1, o.beta2})
      .eps(o.eps.value_or(1e-8))
      .weight_decay(o.weight_decay.value_or(weight_decay))
      .amsgrad(o.amsgrad);
}

}  // namespace

std::unique_ptr<Optimizer> make_torch_optimizer(const std::string& name,
                                                std::vector<at::Tensor> parameters,
                                                const OptimizerOptions& o) {
  namespace optim = torch::optim;
  if (name == "adam") {
    return std::make_unique<TorchOptimizer<optim::Adam, optim::AdamParamState>>(
        name, std::move(parameters), adam_options<optim::AdamOptions>(o, 0));
  }
  if (name == "adamw") {
    return std::make_unique<TorchOptimizer<optim::AdamW, optim::AdamWParamState>>(
        name, std::move(parameters), adam_options<optim::AdamWOptions>(o, 0.01));
  }
  if (name == "rmsprop") {
    return std::make_unique<TorchOptimizer<optim::RMSprop, optim::RMSpropParamState>>(
        name, std::move(parameters),
        optim::RMSpropOptions(o.lr)
            .alpha(o.alpha)
            .eps(o.eps.value_or(1e-8))
            .weight_decay(o.weight_decay.value_or(0))
            .momentum(o.momentum)
            .centered(o.centered));
  }
  if (name == "adagrad") {
    return std::make_unique<TorchOptimizer<optim::Adagrad, optim::AdagradParamState>>(
        name, std::move(parameters),
        optim::AdagradOptions(o.lr)
            .lr_decay(o.lr_decay)
            .weight_decay(o.weight_decay.value_or(0))
            .eps(o.eps.value_or(1e-10)));
  }
  return nullptr;
}

}  // namespace lockstep
