#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "lockstep/parallel/output_tensors.h"

namespace lockstep {
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

/// Puts the replicas' outputs together: the tensors along `dim`, on `device`. Tensors without
/// dimensions become a vector of one element for each replica. Everything that is no tensor is the
/// first replica's. Gradients flow back. Throws UsageError where the replicas gave different
/// numbers of tensors or maps with different keys, and for no outputs.
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
