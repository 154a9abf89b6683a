#include "lockstep/optim/torch_optimizer.h"

#include <ATen/Functions.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/rmsprop.h>

#include <map>
#include <type_traits>

#include "lockstep/optim/optimizer_state.h"

namespace lockstep {
namespace {

enum class Kept { always, by_option, never };

Kept kept_with(bool option) {
  return option ? Kept::by_option : Kept::never;
}

/// The fields of a torch::optim state by name, so that one adapter serves all optimizers.
template <class State>
struct TensorField {
  const char* name;
  at::Tensor& (State::*get)() noexcept;
  Kept kept;  ///< With the options that the optimizer has.
};

auto fields_of(const torch::optim::RMSpropOptions& options) {
  using State = torch::optim::RMSpropParamState;
  return std::vector<TensorField<State>>{
      {"square_avg", &State::square_avg, Kept::always},
      {"momentum_buffer", &State::momentum_buffer, kept_with(options.momentum() > 0)},
      {"grad_avg", &State::grad_avg, kept_with(options.centered())}};
}

auto fields_of(const torch::optim::AdagradOptions&) {
  using State = torch::optim::AdagradParamState;
  return std::vector<TensorField<State>>{{"sum", &State::sum, Kept::always}};
}

template <class Torch, class State>
class TorchOptimizer : public Optimizer {
 public:
  template <class Options>
  TorchOptimizer(std::string name, std::vector<at::Tensor> parameters, const Options& options)
      : name_(std::move(name)),
        parameters_(parameters),
        fields_(fields_of(options)),
        torch_(std::move(parameters), options) {}

  void step() override { torch_.step(); }
  void set_lr(double lr) override { torch_.param_groups()[0].options().set_lr(lr); }
  double lr() const override { return torch_.param_groups()[0].options().get_lr(); }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  const std::string& name() const override { return name_; }
  bool is_elementwise() const override { return true; }

  StateDict state() const override {
    StateDict out;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto found = torch_.state().find(key(i));
      if (found == torch_.state().end()) continue;
      auto& state = static_cast<State&>(*found->second);
      // Adagrad has states from its construction. Without a step they say nothing.
      if (state.step() == 0) continue;
      out.emplace_back(state_key(kStep, i), at::full({1}, state.step(), at::kLong));
      for (const auto& field : fields_) {
        const at::Tensor& tensor = (state.*field.get)();
        if (tensor.defined()) out.emplace_back(state_key(field.name, i), tensor);
      }
    }
    return out;
  }

  void load_state(const StateDict& state) override {
    std::vector<std::string> known{kStep};
    for (const auto& field : fields_) known.emplace_back(field.name);
    std::map<size_t, std::unique_ptr<State>> loaded;
    const auto all = read_state(name_, state, known, parameters_);
    for (const auto& [index, given] : all) loaded[index] = make_state(index, given, all);
    torch_.state().clear();
    for (auto& [index, item] : loaded) torch_.state()[key(index)] = std::move(item);
    if constexpr (std::is_same_v<State, torch::optim::AdagradParamState>) add_fresh_states();
  }

 private:
  void* key(size_t index) const { return parameters_[index].unsafeGetTensorImpl(); }

  /// What an option asks for and no parameter has is of a run without the option, and begins as in
  /// a fresh optimizer.
  std::unique_ptr<State> make_state(size_t index, const StateFields& given,
                                    const std::map<size_t, StateFields>& all) const {
    auto state = std::make_unique<State>();
    state->step(required(name_, given, kStep, index).template item<int64_t>());
    for (const auto& field : fields_) {
      if (field.kept == Kept::never) continue;
      const bool is_new = field.kept == Kept::by_option && !has_field(all, field.name);
      (state.get()->*field.get)() =
          is_new ? at::zeros_like(parameters_[index].detach())
                 : copy_like(required(name_, given, field.name, index), parameters_[index]);
    }
    return state;
  }

  /// LibTorch's adagrad makes states in its constructor only, and needs one for each parameter.
  void add_fresh_states() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      auto& slot = torch_.state()[key(i)];
      if (slot) continue;
      auto fresh = std::make_unique<State>();
      fresh->step(0);
      fresh->sum(at::zeros_like(parameters_[i].detach()));
      slot = std::move(fresh);
    }
  }

  std::string name_;
  std::vector<at::Tensor> parameters_;
  std::vector<TensorField<State>> fields_;
  mutable Torch torch_;  ///< Its const access to state is not const all the way.
};

}  // namespace

std::unique_ptr<Optimizer> make_torch_optimizer(const std::string& name,
                                                std::vector<at::Tensor> parameters,
                                                const OptimizerOptions& o) {
  namespace optim = torch::optim;
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
  return std::make_unique<TorchOptimizer<optim::Adagrad, optim::AdagradParamState>>(
      name, std::move(parameters),
      optim::AdagradOptions(o.lr)
          .lr_decay(o.lr_decay)
          .weight_decay(o.weight_decay.value_or(0))
          .eps(o.eps.value_or(1e-10)));
}

}  // namespace lockstep
