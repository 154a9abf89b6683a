#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep::rpc {

/// How a type is sent: its name in signatures, and its conversion to and from a LibTorch value.
/// Supported are tensors, numbers, bool, strings, vectors, maps, optionals, pairs, tuples, RRefs
/// and structs with `rpc_fields`. A program may add a type by a specialisation with the same three
/// functions.
///
/// - `type()`: the name, such as "list[float64]".
/// - `to(value)`: what is sent. Tensors in it are shared, not copied. It is made of None, bool,
///   int64, double, strings, tensors, references, and tuples of these. Nothing else travels.
/// - `from(ivalue)`: the value again. Throws DataError when it is of another kind.
template <class T>
struct Value;

/// A struct travels when a function `rpc_fields`, found beside it, ties its members:
///
///     struct Batch { at::Tensor images; std::vector<int64_t> labels; };
///     auto rpc_fields(Batch& batch) { return std::tie(batch.images, batch.labels); }
///
/// It needs a default constructor.
template <class T>
concept HasFields = std::is_class_v<T> && requires(T& value) {
  rpc_fields(value);
};

/// A type that can be an argument or a result.
template <class T>
concept Sendable = requires(const at::IValue& sent) {
  { Value<T>::type() } -> std::convertible_to<std::string>;
  { Value<T>::from(sent) } -> std::convertible_to<T>;
};

namespace detail {

/// Throws DataError: `type` was expected, and something else came.
[[noreturn]] void throw_other_kind(const std::string& type, const at::IValue& value);
/// The elements of a tuple. Throws DataError when it is none, or has another number of elements
/// than `size` (-1: any).
std::vector<at::IValue> elements(const at::IValue& value, const std::string& type,
                                 int64_t size = -1);
at::IValue make_tuple(std::vector<at::IValue> elements);
/// Numbers side by side as a tensor of one dimension, and back.
at::Tensor number_tensor(const void* data, int64_t size, at::ScalarType dtype);
void copy_numbers(const at::IValue& value, const std::string& type, at::ScalarType dtype,
                  const std::function<void*(int64_t size)>& room);

/// Numbers with a tensor's dtype: a vector of them travels as a tensor.
template <class T>
concept TensorNumber = std::same_as<T, double> || std::same_as<T, float> ||
    std::same_as<T, int64_t> || std::same_as<T, int32_t> || std::same_as<T, int16_t> ||
    std::same_as<T, uint8_t> || std::same_as<T, int8_t>;

/// "a, b" of the types' names.
template <class... T>
std::string type_names() {
  std::string names;
  ((names += (names.empty() ? "" : ", ") + std::string(Value<T>::type())), ...);
  return names;
}

}  // namespace detail

template <>
struct Value<at::Tensor> {
  static std::string type() { return "Tensor"; }
  /// An undefined tensor stays one.
  static at::IValue to(at::Tensor value) {
    return value.defined() ? at::IValue(value) : at::IValue();
  }
  static at::Tensor from(const at::IValue& sent) {
    if (sent.isNone()) return {};
    if (!sent.isTensor()) detail::throw_other_kind(type(), sent);
    return sent.toTensor();
  }
};

template <>
struct Value<bool> {
  static std::string type() { return "bool"; }
  static at::IValue to(bool value) { return value; }
  static bool from(const at::IValue& sent) {
    if (!sent.isBool()) detail::throw_other_kind(type(), sent);
    return sent.toBool();
  }
};

/// Whole numbers. One that does not fit into the type at the other end is a DataError.
template <class T>
requires(std::integral<T> && !std::same_as<T, bool>) struct Value<T> {
  static std::string type() {
    return (std::is_signed_v<T> ? "int" : "uint") + std::to_string(8 * sizeof(T));
  }
  static at::IValue to(T value) { return static_cast<int64_t>(value); }
  static T from(const at::IValue& sent) {
    if (!sent.isInt()) detail::throw_other_kind(type(), sent);
    const int64_t number = sent.toInt();
    const T value = static_cast<T>(number);
    if (static_cast<int64_t>(value) != number) detail::throw_other_kind(type(), sent);
    return value;
  }
};

template <class T>
requires std::is_enum_v<T>
struct Value<T> {
  using Number = std::underlying_type_t<T>;
  static std::string type() { return "enum[" + Value<Number>::type() + "]"; }
  static at::IValue to(T value) { return Value<Number>::to(static_cast<Number>(value)); }
  static T from(const at::IValue& sent) { return static_cast<T>(Value<Number>::from(sent)); }
};

template <std::floating_point T>
struct Value<T> {
  static std::string type() { return "float" + std::to_string(8 * sizeof(T)); }
  static at::IValue to(T value) { return static_cast<double>(value); }
  static T from(const at::IValue& sent) {
    if (!sent.isDouble()) detail::throw_other_kind(type(), sent);
    return static_cast<T>(sent.toDouble());
  }
};

template <>
struct Value<std::string> {
  static std::string type() { return "string"; }
  static at::IValue to(std::string value) { return value; }
  static std::string from(const at::IValue& sent) {
    if (!sent.isString()) detail::throw_other_kind(type(), sent);
    return sent.toStringRef();
  }
};

template <class T>
struct Value<std::vector<T>> {
  static std::string type() { return "list[" + Value<T>::type() + "]"; }
  static at::IValue to(std::vector<T> value) {
    if constexpr (detail::TensorNumber<T>) {
      return detail::number_tensor(value.data(), static_cast<int64_t>(value.size()),
                                   c10::CppTypeToScalarType<T>::value);
    } else {
      std::vector<at::IValue> elements;
      elements.reserve(value.size());
      for (auto&& element : value) elements.push_back(Value<T>::to(std::move(element)));
      return detail::make_tuple(std::move(elements));
    }
  }
  static std::vector<T> from(const at::IValue& sent) {
    std::vector<T> value;
    if constexpr (detail::TensorNumber<T>) {
      detail::copy_numbers(sent, type(), c10::CppTypeToScalarType<T>::value,
                           [&](int64_t size) -> void* {
                             value.resize(static_cast<size_t>(size));
                             return value.data();
                           });
    } else {
      const auto elements = detail::elements(sent, type());
      value.reserve(elements.size());
      for (const auto& element : elements) value.push_back(Value<T>::from(element));
    }
    return value;
  }
};

template <class T>
struct Value<std::optional<T>> {
  static std::string type() { return "optional[" + Value<T>::type() + "]"; }
  static at::IValue to(std::optional<T> value) {
    std::vector<at::IValue> elements;
    if (value) elements.push_back(Value<T>::to(std::move(*value)));
    return detail::make_tuple(std::move(elements));
  }
  static std::optional<T> from(const at::IValue& sent) {
    const auto elements = detail::elements(sent, type());
    if (elements.size() > 1) detail::throw_other_kind(type(), sent);
    if (elements.empty()) return std::nullopt;
    return Value<T>::from(elements[0]);
  }
};

namespace detail {

template <class Map>
struct MapValue {
  using K = Map::key_type;
  using V = Map::mapped_type;
  static std::string type() { return "dict[" + type_names<K, V>() + "]"; }
  static at::IValue to(const Map& value) {
    std::vector<at::IValue> elements;
    elements.reserve(2 * value.size());
    for (const auto& [key, mapped] : value) {
      elements.push_back(Value<K>::to(key));
      elements.push_back(Value<V>::to(mapped));
    }
    return make_tuple(std::move(elements));
  }
  static Map from(const at::IValue& sent) {
    const auto parts = elements(sent, type());
    if (parts.size() % 2 != 0) throw_other_kind(type(), sent);
    Map value;
    for (size_t i = 0; i < parts.size(); i += 2) {
      value.emplace(Value<K>::from(parts[i]), Value<V>::from(parts[i + 1]));
    }
    return value;
  }
};

template <class Tuple, class... T>
struct TupleValue {
  static std::string type() { return "tuple[" + type_names<T...>() + "]"; }
  static at::IValue to(Tuple value) {
    return std::apply([](T&... part) { return make_tuple({Value<T>::to(std::move(part))...}); },
                      value);
  }
  static Tuple from(const at::IValue& sent) {
    return from_parts(elements(sent, type(), sizeof...(T)), std::index_sequence_for<T...>());
  }

 private:
  template <size_t... I>
  static Tuple from_parts(const std::vector<at::IValue>& parts, std::index_sequence<I...>) {
    return Tuple(Value<T>::from(parts[I])...);
  }
};

}  // namespace detail

template <class K, class V>
struct Value<std::map<K, V>> : detail::MapValue<std::map<K, V>> {};
template <class K, class V>
struct Value<std::unordered_map<K, V>> : detail::MapValue<std::unordered_map<K, V>> {};
template <class A, class B>
struct Value<std::pair<A, B>> : detail::TupleValue<std::pair<A, B>, A, B> {};
template <class... T>
struct Value<std::tuple<T...>> : detail::TupleValue<std::tuple<T...>, T...> {};

template <HasFields T>
struct Value<T> {
  static std::string type() {
    T value{};
    return std::apply(
        [](auto&... field) {
          return "struct[" + detail::type_names<std::remove_cvref_t<decltype(field)>...>() + "]";
        },
        rpc_fields(value));
  }
  static at::IValue to(T value) {
    return std::apply(
        [](auto&... field) {
          return detail::make_tuple(
              {Value<std::remove_cvref_t<decltype(field)>>::to(std::move(field))...});
        },
        rpc_fields(value));
  }
  static T from(const at::IValue& sent) {
    T value{};
    std::apply(
        [&](auto&... field) {
          const auto parts = detail::elements(sent, type(), sizeof...(field));
          size_t i = 0;
          ((field = Value<std::remove_cvref_t<decltype(field)>>::from(parts[i++])), ...);
        },
        rpc_fields(value));
    return value;
  }
};

}  // namespace lockstep::rpc
