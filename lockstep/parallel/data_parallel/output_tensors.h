#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep::detail {

/// Stands for a value of any type but Self and its bases. As an rvalue it prefers a constructor of
/// the other type to its own conversion, which keeps std::optional's unambiguous.
template <class Self>
struct AnyField {
  template <class T>
  requires(!std::is_base_of_v<T, Self>) operator T() const&;  // NOLINT(google-explicit-constructor)
};
/// The same for a reference, which a value cannot initialize.
template <class Self>
struct AnyReference {
  template <class T>
  requires(!std::is_base_of_v<T, Self>) operator T&()
      const&;  // NOLINT(google-explicit-constructor)
};

template <class T, size_t>
using FieldAt = AnyField<T>;

template <class T, class... Last, size_t... I>
constexpr bool takes_fields(std::index_sequence<I...>) {
  return requires {
    T(FieldAt<T, I>{}..., Last{}...);
  };
}
template <class T, size_t... I>
constexpr bool takes_values(std::index_sequence<I...>) {
  return requires {
    T{FieldAt<T, I>{}...};
  };
}

inline constexpr size_t kMostFields = 12;

/// The largest number from 1 to one above kMostFields for which `fits` holds, or 0.
template <class Fits>
constexpr size_t largest_number(Fits fits) {
  size_t largest = 0;
  const auto look = [&]<size_t... I>(std::index_sequence<I...>) {
    ((fits(std::make_index_sequence<I + 1>()) ? largest = I + 1 : 0), ...);
  };
  look(std::make_index_sequence<kMostFields + 1>());
  return largest;
}

/// How many fields T has, where it is a simple aggregate: a struct whose fields a structured
/// binding gives. 0 for all else: more than kMostFields, a base class, an array or an lvalue
/// reference among them. The counting is that of Boost.PFR (A. Polukhin), by what T can be made of.
/// It takes C++20's initialization in parentheses: without it no type is simple.
template <class T>
constexpr size_t count_fields() {
  if constexpr (!std::is_aggregate_v<T> || std::is_array_v<T> || std::is_union_v<T>) {
    return 0;
  } else {
    // Braces may be left out around the values of an inner array, parentheses may not.
    constexpr size_t fields = largest_number([](auto number) { return takes_fields<T>(number); });
    constexpr size_t values = largest_number([](auto number) { return takes_values<T>(number); });
    constexpr bool goes_on = takes_fields<T, AnyReference<T>>(std::make_index_sequence<fields>());
    return fields == values && fields <= kMostFields && !goes_on ? fields : 0;
  }
}

/// References to all fields.
template <class T>
auto tie_fields(T& t) {
  constexpr size_t n = count_fields<T>();
  if constexpr (n == 1) {
    auto& [a] = t;
    return std::tie(a);
  } else if constexpr (n == 2) {
    auto& [a, b] = t;
    return std::tie(a, b);
  } else if constexpr (n == 3) {
    auto& [a, b, c] = t;
    return std::tie(a, b, c);
  } else if constexpr (n == 4) {
    auto& [a, b, c, d] = t;
    return std::tie(a, b, c, d);
  } else if constexpr (n == 5) {
    auto& [a, b, c, d, e] = t;
    return std::tie(a, b, c, d, e);
  } else if constexpr (n == 6) {
    auto& [a, b, c, d, e, f] = t;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (n == 7) {
    auto& [a, b, c, d, e, f, g] = t;
    return std::tie(a, b, c, d, e, f, g);
  } else if constexpr (n == 8) {
    auto& [a, b, c, d, e, f, g, h] = t;
    return std::tie(a, b, c, d, e, f, g, h);
  } else if constexpr (n == 9) {
    auto& [a, b, c, d, e, f, g, h, i] = t;
    return std::tie(a, b, c, d, e, f, g, h, i);
  } else if constexpr (n == 10) {
    auto& [a, b, c, d, e, f, g, h, i, j] = t;
    return std::tie(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (n == 11) {
    auto& [a, b, c, d, e, f, g, h, i, j, k] = t;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k);
  } else if constexpr (n == 12) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l] = t;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l);
  } else {
    return std::tuple<>();
  }
}

}  // namespace lockstep::detail

namespace lockstep {

/// How DataParallel finds the tensors in what a module's forward takes and returns. `visit` calls
/// `f` with a reference to each tensor, always in the same order. `f` may replace it.
///
/// A simple struct needs nothing: up to 12 fields, each with tensors to be found in, a number, an
/// enumeration or a std::string, and no base class, array or bit-field. Specialise for any other
/// type:
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
/// such, a simple struct with such, or a type for which OutputTensors is specialised.
template <class T>
concept CarriesTensors = requires {
  sizeof(OutputTensors<T>);
};

template <class T, class F>
void visit_tensors(T& output, F&& f) {
  OutputTensors<T>::visit(output, f);
}

namespace detail {

/// None of a value without tensors.
template <class T>
std::vector<at::Tensor> collect_tensors(T& value) {
  std::vector<at::Tensor> tensors;
  if constexpr (CarriesTensors<T>)
    visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Puts in others for those that collect_tensors gives.
template <class T>
void replace_tensors(T& value, const std::vector<at::Tensor>& others) {
  if constexpr (CarriesTensors<T>) {
    visit_tensors(value,
                  [&, next = size_t{0}](at::Tensor& tensor) mutable { tensor = others[next++]; });
  }
}

/// Of a container.
struct EachItem {
  template <class T, class F>
  static void visit(T& output, F&& f) {
    for (auto& item : output) visit_tensors(item, f);
  }
};

/// Of a tuple. Elements without tensors are passed over.
struct EachElement {
  template <class T, class F>
  static void visit(T&& output, F&& f) {
    const auto visit_one = [&]<class Element>(Element& element) {
      if constexpr (CarriesTensors<Element>) visit_tensors(element, f);
    };
    std::apply([&](auto&... elements) { (visit_one(elements), ...); }, output);
  }
};

}  // namespace detail

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
struct OutputTensors<std::vector<T>> : detail::EachItem {};

template <class K, CarriesTensors T>
struct OutputTensors<std::map<K, T>> : detail::EachItem {};

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

template <CarriesTensors T, size_t N>
struct OutputTensors<std::array<T, N>> : detail::EachElement {};

template <class... Ts>
requires(CarriesTensors<Ts> || ...) struct OutputTensors<std::tuple<Ts...>> : detail::EachElement {
};

template <class A, class B>
requires(CarriesTensors<A> || CarriesTensors<B>) struct OutputTensors<std::pair<A, B>>
    : detail::EachElement {
};

namespace detail {

/// Surely holds no tensor.
template <class T>
concept HoldsNoTensor =
    std::is_arithmetic_v<T> || std::is_enum_v<T> || std::same_as<T, std::string>;

/// `T...` are the fields of a simple struct, of which each can be judged.
template <class... Ts>
constexpr bool fields_carry_tensors(std::type_identity<std::tuple<Ts&...>>) {
  return (CarriesTensors<Ts> || ...) && ((CarriesTensors<Ts> || HoldsNoTensor<Ts>)&&...);
}

template <class T>
concept SimpleStruct = count_fields<T>()
> 0 && fields_carry_tensors(std::type_identity<decltype(tie_fields(std::declval<T&>()))>());

}  // namespace detail

/// In the order of the fields.
template <detail::SimpleStruct T>
struct OutputTensors<T> {
  template <class F>
  static void visit(T& output, F&& f) {
    detail::EachElement::visit(detail::tie_fields(output), f);
  }
};

}  // namespace lockstep
