#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <concepts>
#include <cstdint>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "lockstep/data/loader.h"

namespace lockstep {

/// What a Trainer must know of a type of batches. Specialise it for one of your own, or override
/// TrainingModule's batch_size and prepare_batch. By itself a batch that has a `size()` counts that
/// many samples, any other one, and it stays where it is.
template <class B>
struct BatchTraits {
  static int64_t size(const B& batch) {
    if constexpr (requires {
                    { batch.size() } -> std::convertible_to<int64_t>;
                  }) {
      return static_cast<int64_t>(batch.size());
    } else {
      return 1;
    }
  }
  static B to(const B& batch, c10::Device) { return batch; }
};

/// A tensor's first dimension are the samples.
template <>
struct BatchTraits<at::Tensor> {
  static int64_t size(const at::Tensor& batch) { return batch.dim() > 0 ? batch.size(0) : 1; }
  static at::Tensor to(const at::Tensor& batch, c10::Device device) {
    return device.is_cpu() ? batch : batch.to(device, /*non_blocking=*/true);
  }
  static void cast(at::Tensor& batch, at::ScalarType dtype) {
    if (batch.is_floating_point()) batch = batch.to(dtype);
  }
};

/// The loader's own.
template <>
struct BatchTraits<Batch> {
  static int64_t size(const Batch& batch) { return batch.size(); }
  static Batch to(const Batch& batch, c10::Device device) {
    Batch moved = batch;
    moved.data = BatchTraits<at::Tensor>::to(batch.data, device);
    moved.target = BatchTraits<at::Tensor>::to(batch.target, device);
    return moved;
  }
  /// The loss is computed in float32, and so is what it compares with.
  static void cast(Batch& batch, at::ScalarType dtype) {
    BatchTraits<at::Tensor>::cast(batch.data, dtype);
  }
};

/// The first member says how many samples there are.
template <class A, class B>
struct BatchTraits<std::pair<A, B>> {
  static int64_t size(const std::pair<A, B>& batch) { return BatchTraits<A>::size(batch.first); }
  static std::pair<A, B> to(const std::pair<A, B>& batch, c10::Device device) {
    return {BatchTraits<A>::to(batch.first, device), BatchTraits<B>::to(batch.second, device)};
  }
  static void cast(std::pair<A, B>& batch, at::ScalarType dtype) requires requires {
    BatchTraits<A>::cast(batch.first, dtype);
  }
  {
    BatchTraits<A>::cast(batch.first, dtype);
    if constexpr (requires { BatchTraits<B>::cast(batch.second, dtype); }) {
      BatchTraits<B>::cast(batch.second, dtype);
    }
  }
};
template <class First, class... Rest>
struct BatchTraits<std::tuple<First, Rest...>> {
  using Tuple = std::tuple<First, Rest...>;
  static int64_t size(const Tuple& batch) { return BatchTraits<First>::size(std::get<0>(batch)); }
  static Tuple to(const Tuple& batch, c10::Device device) {
    return std::apply(
        [&](const First& first, const Rest&... rest) {
          return Tuple(BatchTraits<First>::to(first, device),
                       BatchTraits<Rest>::to(rest, device)...);
        },
        batch);
  }
};
template <>
struct BatchTraits<std::vector<at::Tensor>> {
  static int64_t size(const std::vector<at::Tensor>& batch) {
    return batch.empty() ? 0 : BatchTraits<at::Tensor>::size(batch.front());
  }
  static std::vector<at::Tensor> to(const std::vector<at::Tensor>& batch, c10::Device device) {
    std::vector<at::Tensor> moved;
    for (const at::Tensor& tensor : batch) {
      moved.push_back(BatchTraits<at::Tensor>::to(tensor, device));
    }
    return moved;
  }
  static void cast(std::vector<at::Tensor>& batch, at::ScalarType dtype) {
    for (at::Tensor& tensor : batch) BatchTraits<at::Tensor>::cast(tensor, dtype);
  }
};

namespace detail {

/// A batch on its way from a loader to the module that takes batches of its type, through code that
/// does not know the type. It refers to the batch, which must outlive it.
class AnyBatch {
 public:
  template <class B>
  explicit AnyBatch(const B& batch) : batch_(&batch), type_(&typeid(B)) {}
  /// Throws std::bad_cast where it is a batch of another type.
  template <class B>
  const B& as() const {
    if (*type_ != typeid(B)) throw std::bad_cast();
    return *static_cast<const B*>(batch_);
  }

 private:
  const void* batch_;
  const std::type_info* type_;
};

}  // namespace detail
}  // namespace lockstep
