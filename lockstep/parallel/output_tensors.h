#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <concepts>
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

/// Whether there are tensors to be found in a T: it is a tensor, one of the containers below of
/// such, or a type for which OutputTensors is specialised.
template <class T>
concept CarriesTensors = requires {
  sizeof(OutputTensors<T>);
};

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

template <CarriesTensors T>
struct OutputTensors<std::optional<T>> {
  template <class F>
  static void visit(std::optional<T>& output, F&& f) {
    if (output) visit_tensors(*output, f);
  }
};

template <CarriesTensors T>
struct OutputTensors<std::vector<T>> {
  template <class F>
  static void visit(std::vector<T>& output, F&& f) {
    for (T& item : output) visit_tensors(item, f);
  }
};

template <CarriesTensors T, size_t N>
struct OutputTensors<std::array<T, N>> {
  template <class F>
  static void visit(std::array<T, N>& output, F&& f) {
    for (T& item : output) visit_tensors(item, f);
  }
};

template <class K, CarriesTensors T>
struct OutputTensors<std::map<K, T>> {
  template <class F>
  static void visit(std::map<K, T>& output, F&& f) {
    for (auto& [key, item] : output) visit_tensors(item, f);
  }
};

/// In the order of the keys where they have one: two maps of the same keys need not hold them in
/// the same order.
template <class K, CarriesTensors T>
struct OutputTensors<std::unordered_map<K, T>> {
  template <class F>
  static void visit(std::unordered_map<K, T>& output, F&& f) {
    std::vector<std::pair<const K, T>*> items;
    for (auto& item : output) items.push_back(&item);
    if constexpr (std::totally_ordered<K>) {
      std::sort(items.begin(), items.end(),
                [](const auto* a, const auto* b) { return a->first < b->first; });
    }
    for (auto* item : items) visit_tensors(item->second, f);
  }
};

/// Elements without tensors are passed over.
template <class... Ts>
requires(CarriesTensors<Ts> || ...) struct OutputTensors<std::tuple<Ts...>> {
  template <class F>
  static void visit(std::tuple<Ts...>& output, F&& f) {
    const auto visit_one = [&]<class T>(T& item) {
      if constexpr (CarriesTensors<T>) visit_tensors(item, f);
    };
    std::apply([&](Ts&... items) { (visit_one(items), ...); }, output);
  }
};

template <class A, class B>
requires(CarriesTensors<A> || CarriesTensors<B>) struct OutputTensors<std::pair<A, B>> {
  template <class F>
  static void visit(std::pair<A, B>& output, F&& f) {
    if constexpr (CarriesTensors<A>) visit_tensors(output.first, f);
    if constexpr (CarriesTensors<B>) visit_tensors(output.second, f);
  }
};

}  // namespace lockstep
