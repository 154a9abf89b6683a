#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>

#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/output_tensors.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// While it lives, gradients are not synchronized between ranks.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(bool& synchronizing)
      : synchronizing_(synchronizing), before_(std::exchange(synchronizing, false)) {}
  ~NoSync() { synchronizing_ = before_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  bool& synchronizing_;
  bool before_;
};

/// What DistributedDataParallel and FullyShardedDataParallel share: a module with something to do
/// before and after its forward. `Core` does that. It has before_forward(), wants_outputs(),
/// after_forward(outputs), synchronizing(), group() and statistics().
template <class ModulePtr, class Core>
class WrappedModule {
  static_assert(
      !std::is_pointer_v<ModulePtr>,
      "the wrapper keeps its module: give it a std::shared_ptr or a module holder, no raw "
      "pointer. For a module on the stack take lockstep::GradientAverager(model, group)");
  static_assert(!std::is_base_of_v<torch::nn::Module, ModulePtr>,
                "the wrapper keeps its module: give it a std::shared_ptr or a module holder, no "
                "module. For a module on the stack take lockstep::GradientAverager(model, group)");

 public:
  template <class... Args>
  auto forward(Args&&... args) {
    core_.before_forward();
    auto output = module_->forward(std::forward<Args>(args)...);
    if (core_.wants_outputs()) {
      pass(output);
    } else {
      std::vector<at::Tensor> none;
      core_.after_forward(none);
    }
    return output;
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// While the guard lives, backward only adds gradients up on this rank. The first backward after
  /// it averages the sum. The forward must be inside too.
  NoSync no_sync() { return NoSync(core_.synchronizing()); }

  /// Of the module: its mode and its parameters, for an optimizer. A weight that several layers
  /// share is there once.
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  std::vector<at::Tensor> parameters() const { return unique_parameters(module_->parameters()); }

  /// The wrapped module: what to save, without any prefix in its names.
  auto& module() { return *module_; }
  const auto& module() const { return *module_; }
  const ProcessGroup& group() const { return core_.group(); }
  auto statistics() const { return core_.statistics(); }

 protected:
  template <class... Args>
  explicit WrappedModule(ModulePtr module, Args&&... of_core)
      : module_(std::move(module)), core_(std::forward<Args>(of_core)...) {}

  /// Of a std::shared_ptr or of LibTorch's ModuleHolder.
  static std::shared_ptr<torch::nn::Module> pointer(const ModulePtr& module) {
    if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      return module;
    }
  }

  ModulePtr module_;
  Core core_;

 private:
  /// Hands the tensors in `output` to the core, which may replace them.
  template <class Output>
  void pass(Output& output) {
    if constexpr (CarriesTensors<Output>) {
      std::vector<at::Tensor> tensors;
      visit_tensors(output, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
      core_.after_forward(tensors);
      visit_tensors(
          output, [&, next = size_t{0}](at::Tensor& tensor) mutable { tensor = tensors[next++]; });
    } else {
      detail::throw_unknown_output(c10::demangle(typeid(Output).name()));
    }
  }
};

}  // namespace lockstep
