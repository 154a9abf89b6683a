#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/optim/optim.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

namespace detail {

/// Of a std::shared_ptr or of LibTorch's ModuleHolder.
template <class ModulePtr>
std::shared_ptr<torch::nn::Module> module_pointer(const ModulePtr& module) {
  if constexpr (requires { module.ptr(); }) {
    return module.ptr();
  } else {
    return module;
  }
}

}  // namespace detail

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
/// before and after its forward. `Core` does that. It has before_forward(), after_forward(),
/// synchronizing(), group() and statistics().
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
    core_->before_forward();
    auto output = module_->forward(std::forward<Args>(args)...);
    core_->after_forward();
    return output;
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// While the guard lives, backward only adds gradients up on this rank. The first backward after
  /// it averages the sum. The forward must be inside too.
  NoSync no_sync() { return NoSync(core_->synchronizing()); }

  /// Of the module: its mode and its parameters, for an optimizer. A weight that several layers
  /// share is there once.
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  std::vector<at::Tensor> parameters() const { return unique_parameters(module_->parameters()); }

  /// The wrapped module: what to save, without any prefix in its names.
  auto& module() { return *module_; }
  const auto& module() const { return *module_; }
  const ProcessGroup& group() const { return core_->group(); }
  auto statistics() const { return core_->statistics(); }

 protected:
  WrappedModule(ModulePtr module, std::unique_ptr<Core> core)
      : module_(std::move(module)), core_(std::move(core)) {}

  ModulePtr module_;
  std::unique_ptr<Core> core_;
};

}  // namespace lockstep
