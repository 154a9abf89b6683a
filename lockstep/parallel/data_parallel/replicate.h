#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

namespace lockstep {
namespace detail {

template <class ModulePtr>
using ModuleOf = std::remove_cvref_t<decltype(*std::declval<const ModulePtr&>())>;

template <class ModulePtr>
std::shared_ptr<torch::nn::Module> module_pointer(const ModulePtr& module) {
  if constexpr (requires { module.ptr(); }) {
    return module.ptr();
  } else {
    return module;
  }
}

template <class ModulePtr>
ModulePtr typed_pointer(const std::shared_ptr<torch::nn::Module>& module) {
  return ModulePtr(std::dynamic_pointer_cast<ModuleOf<ModulePtr>>(module));
}

/// Another module of the same structure on `device`, made by `clone`, or by `make` where it is
/// given. Leaves the random numbers of the CPU as they were. Throws UsageError where the module
/// cannot be cloned, or the copy has other tensors.
std::shared_ptr<torch::nn::Module> copy_module(
    const std::shared_ptr<torch::nn::Module>& module, c10::Device device,
    const std::function<std::shared_ptr<torch::nn::Module>()>& make = {});

/// A module and copies of it, whose tensors are kept equal to the module's. On the device of the
/// module a copy's parameters are the module's own memory. Of buffers that holds for the first
/// copy; the others have their own, so that what they write is lost.
class ReplicaSet {
 public:
  ReplicaSet(std::shared_ptr<torch::nn::Module> module,
             std::vector<std::shared_ptr<torch::nn::Module>> replicas);
  ~ReplicaSet();
  ReplicaSet(ReplicaSet&&) noexcept;
  ReplicaSet& operator=(ReplicaSet&&) noexcept;

  /// Before a forward of the first `count` replicas: brings over what has changed in the module,
  /// and its training modes. With `link` backward goes on from the replicas' parameters to the
  /// module's, where it adds the replicas' gradients in their order.
  void refresh(size_t count, bool link);
  const std::vector<std::shared_ptr<torch::nn::Module>>& replicas() const;
  /// Tensors of replicas into which values were copied, so far.
  int64_t copies() const;
  /// Bytes of parameters that replicas have for themselves.
  int64_t own_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

/// A copy of the module on each device, as torch.nn.parallel.replicate. A device may be named
/// twice. Unless `detach` is set, backward through a copy reaches the module's parameters. On the
/// module's own device a copy's parameters share their memory. The copies are for one forward: make
/// new ones, or use DataParallel, which keeps them, after the parameters have changed.
///
/// The module must be torch::nn::Cloneable, as LibTorch's own modules are, or override `clone`.
/// Throws UsageError where it is not.
template <class ModulePtr>
std::vector<ModulePtr> replicate(const ModulePtr& module, const std::vector<c10::Device>& devices,
                                 bool detach = !c10::GradMode::is_enabled()) {
  const auto pointer = detail::module_pointer(module);
  std::vector<std::shared_ptr<torch::nn::Module>> copies;
  std::vector<ModulePtr> replicas;
  for (const c10::Device device : devices) {
    copies.push_back(detail::copy_module(pointer, device));
    replicas.push_back(detail::typed_pointer<ModulePtr>(copies.back()));
  }
  detail::ReplicaSet(pointer, std::move(copies)).refresh(devices.size(), !detach);
  return replicas;
}

}  // namespace lockstep
