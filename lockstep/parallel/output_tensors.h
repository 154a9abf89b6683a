#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace lockstep {

/// How DistributedDataParallel finds the tensors in what a module's forward returns. Specialise for
/// a type of your own:
///
///     template <> struct lockstep::OutputTensors<MyOutput> {
///       static void collect(const MyOutput& output, std::vector<at::Tensor>& into) {
///         into.push_back(output.logits);
///       }
///     };
template <class T>
struct OutputTensors;

template <>
struct OutputTensors<at::Tensor> {
  static void collect(const at::Tensor& output, std::vector<at::Tensor>& into) {
    if (output.defined()) into.push_back(output);
  }
};

template <class T>
struct OutputTensors<std::vector<T>> {
  static void collect(const std::vector<T>& output, std::vector<at::Tensor>& into) {
    for (const auto& item : output) OutputTensors<T>::collect(item, into);
  }
};

template <class K, class T>
struct OutputTensors<std::map<K, T>> {
  static void collect(const std::map<K, T>& output, std::vector<at::Tensor>& into) {
    for (const auto& [key, item] : output) OutputTensors<T>::collect(item, into);
  }
};

template <class K, class T>
struct OutputTensors<std::unordered_map<K, T>> {
  static void collect(const std::unordered_map<K, T>& output, std::vector<at::Tensor>& into) {
    for (const auto& [key, item] : output) OutputTensors<T>::collect(item, into);
  }
};

template <class... Ts>
struct OutputTensors<std::tuple<Ts...>> {
  static void collect(const std::tuple<Ts...>& output, std::vector<at::Tensor>& into) {
    std::apply([&](const Ts&... items) { (OutputTensors<Ts>::collect(items, into), ...); }, output);
  }
};

template <class A, class B>
struct OutputTensors<std::pair<A, B>> {
  static void collect(const std::pair<A, B>& output, std::vector<at::Tensor>& into) {
    OutputTensors<A>::collect(output.first, into);
    OutputTensors<B>::collect(output.second, into);
  }
};

template <class T>
std::vector<at::Tensor> output_tensors(const T& output) {
  std::vector<at::Tensor> tensors;
  OutputTensors<T>::collect(output, tensors);
  return tensors;
}

}  // namespace lockstep
