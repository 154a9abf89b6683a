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

#include "lockstep/parallel/output_tensors.h"

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
/// new ones after the parameters have changed, or use DataParallel, which updates them.
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

namespace detail {

/// A tensor's part for each device; fewer where there are fewer rows than devices.
std::vector<at::Tensor> scatter_tensor(const at::Tensor& tensor,
                                       const std::vector<c10::Device>& devices, int64_t dim);
at::Tensor gather_tensors(const std::vector<at::Tensor>& parts, c10::Device device, int64_t dim);

/// The tensors of a value and what becomes of them: `parts[t][i]` is what device i gets of the
/// value's tensor t. Throws UsageError where tensors do not give equally many parts.
size_t common_parts(const std::vector<at::Tensor>& tensors,
                    const std::vector<std::vector<at::Tensor>>& parts, size_t devices);
/// Throws UsageError where replicas gave different numbers of tensors.
void check_gathered(const std::vector<std::vector<at::Tensor>>& tensors);
[[noreturn]] void throw_other_keys(size_t replica);

template <class T>
std::vector<at::Tensor> tensors_of(T& value) {
  std::vector<at::Tensor> tensors;
  if constexpr (CarriesTensors<T>) {
    visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

/// Puts as many tensors as it has into the value.
template <class T, class Next>
void replace_tensors(T& value, Next&& next) {
  if constexpr (CarriesTensors<T>) {
    visit_tensors(value, [&](at::Tensor& tensor) { tensor = next(); });
  }
}

}  // namespace detail

/// Cuts the tensors in `value` along `dim` into a part for each device, as torch.Tensor.chunk does,
/// and moves each part there. Everything else is copied for each. `value` is a tensor, or what
/// OutputTensors knows: tuples, vectors, maps, types of your own. A tensor without dimensions goes
/// to each device whole. Where there are fewer rows than devices, there are fewer parts. On the
/// device where a tensor lies its parts share its memory. Gradients flow back into the tensors.
///
/// Throws UsageError where the tensors give different numbers of parts. (Python drops the rows that
/// are left over.)
template <class T>
std::vector<T> scatter(const T& value, const std::vector<c10::Device>& devices, int64_t dim = 0) {
  T copy = value;
  const std::vector<at::Tensor> tensors = detail::tensors_of(copy);
  std::vector<std::vector<at::Tensor>> chunks;
  chunks.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    chunks.push_back(detail::scatter_tensor(tensor, devices, dim));
  }
  std::vector<T> parts(detail::common_parts(tensors, chunks, devices.size()), value);
  for (size_t i = 0; i < parts.size(); ++i) {
    detail::replace_tensors(parts[i],
                            [&, next = size_t{0}]() mutable { return chunks[next++][i]; });
  }
  return parts;
}

/// Concatenates the replicas' output tensors along `dim`, on `device`. Tensors without dimensions
/// become a vector of one element per replica. Everything that is not a tensor is taken from the
/// first replica. Gradients flow back. Throws UsageError where the replicas gave different numbers
/// of tensors or maps with different keys, and for no outputs.
template <class T>
T gather(const std::vector<T>& outputs, c10::Device device, int64_t dim = 0) {
  std::vector<T> copies = outputs;
  std::vector<std::vector<at::Tensor>> tensors;
  tensors.reserve(copies.size());
  for (T& copy : copies) tensors.push_back(detail::tensors_of(copy));
  detail::check_gathered(tensors);
  if constexpr (requires { typename T::key_type; }) {
    for (size_t i = 1; i < copies.size(); ++i) {
      for (const auto& [key, item] : copies[0]) {
        if (!copies[i].contains(key)) detail::throw_other_keys(i);
      }
    }
  }
  T result = std::move(copies.front());
  detail::replace_tensors(result, [&, next = size_t{0}]() mutable {
    std::vector<at::Tensor> parts;
    parts.reserve(tensors.size());
    for (const auto& of_replica : tensors) parts.push_back(of_replica[next]);
    ++next;
    return detail::gather_tensors(parts, device, dim);
  });
  return result;
}

}  // namespace lockstep
