#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

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
