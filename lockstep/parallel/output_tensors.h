#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {

/// How DistributedDataParallel finds the tensors in what a module's forward returns. `visit` calls
/// `f` with a reference to each tensor, always in the same order. `f` may replace it. Specialise
/// for a type of your own:
///
///     template <> struct lockstep::OutputTensors<MyOutput> {
///       template <class F> static void visit(MyOutput& output, F&& f) {
///         lockstep::visit_tensors(output.logits, f);
///         lockstep::visit_tensors(output.hidden, f);
///       }
///     };
template <class T>
struct OutputTensors;

template <class T, class F>
void visit_tensors(T& output, F&& f) {
  OutputTensors<T>::visit(output, f);
}

template <>
struct OutputTensors<at::Tensor> {
  template <class F>
  static void visit(at::Tensor& output, F&& f) {
    if (output.defined()) f(output);
  }
};

template <class T>
struct OutputTensors<std::optional<T>> {
  template <class F>
  static void visit(std::optional<T>& output, F&& f) {
    if (output) visit_tensors(*output, f);
  }
};

template <class T>
struct OutputTensors<std::vector<T>> {
  template <class F>
  static void visit(std::vector<T>& output, F&& f) {
    for (T& item : output) visit_tensors(item, f);
  }
};

template <class T, size_t N>
struct OutputTensors<std::array<T, N>> {
  template <class F>
  static void visit(std::array<T, N>& output, F&& f) {
    for (T& item : output) visit_tensors(item, f);
  }
};

template <class K, class T>
struct OutputTensors<std::map<K, T>> {
  template <class F>
  static void visit(std::map<K, T>& output, F&& f) {
    for (auto& [key, item] : output) visit_tensors(item, f);
  }
};

template <class K, class T>
struct OutputTensors<std::unordered_map<K, T>> {
  template <class F>
  static void visit(std::unordered_map<K, T>& output, F&& f) {
    for (auto& [key, item] : output) visit_tensors(item, f);
  }
};

template <class... Ts>
struct OutputTensors<std::tuple<Ts...>> {
  template <class F>
  static void visit(std::tuple<Ts...>& output, F&& f) {
    std::apply([&](Ts&... items) { (visit_tensors(items, f), ...); }, output);
  }
};

template <class A, class B>
struct OutputTensors<std::pair<A, B>> {
  template <class F>
  static void visit(std::pair<A, B>& output, F&& f) {
    visit_tensors(output.first, f);
    visit_tensors(output.second, f);
  }
};

}  // namespace lockstep
