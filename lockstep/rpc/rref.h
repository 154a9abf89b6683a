#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/rref_interface.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>

#include "lockstep/rpc/value.h"

namespace lockstep::rpc {

template <class Types>
class Function;
template <class T>
class RRef;

namespace detail {

using RRefPtr = c10::intrusive_ptr<c10::RRefInterface>;
using Limit = std::optional<std::chrono::milliseconds>;

/// An object that does not travel, as a value that an RRef can hold.
at::IValue hold_object(std::shared_ptr<void> object, const std::type_info& type);
/// The object again. Throws UsageError when the value is none, or of another type.
std::shared_ptr<void> held_object(const at::IValue& value, const std::type_info& type);

RRefPtr own_value(at::IValue value);
at::IValue fetch_value(const RRefPtr& rref, Limit limit);
at::IValue local_value(const RRefPtr& rref, Limit limit);
std::string owner_name(const RRefPtr& rref);
/// Throws DataError when the value is no RRef.
RRefPtr rref_of(const at::IValue& value);
/// Throws UsageError for an empty handle.
const RRefPtr& checked(const RRefPtr& rref);

/// The T of RRef<T> for a function whose result is a T or a pointer to one.
template <class T>
struct PointedTo {
  using type = T;
  static std::shared_ptr<T> pointer(T object) { return std::make_shared<T>(std::move(object)); }
};
template <class T>
struct PointedTo<std::shared_ptr<T>> {
  using type = T;
  static std::shared_ptr<T> pointer(std::shared_ptr<T> object) { return object; }
};

template <class T>
at::IValue object_value(T object) {
  using Object = PointedTo<T>::type;
  return hold_object(PointedTo<T>::pointer(std::move(object)), typeid(Object));
}

}  // namespace detail

/// A reference to a value on some worker, its owner. A handle, whose copies share the reference.
/// Sent to another worker, it is a reference there too (a fork). The owner keeps the value until
/// all references are gone. Any thread.
///
/// T either travels (see value.h), or is any class: then the object stays with its owner, and only
/// references to it travel.
template <class T>
class RRef {
 public:
  RRef() = default;
  explicit RRef(detail::RRefPtr native) : native_(std::move(native)) {}
  /// A reference to a value of this worker.
  static RRef own(T value) requires Sendable<T> {
    return RRef(detail::own_value(Value<T>::to(std::move(value))));
  }
  static RRef own(std::shared_ptr<T> object) requires(!Sendable<T>) {
    return RRef(detail::own_value(detail::object_value(std::move(object))));
  }

  bool is_owner() const { return detail::checked(native_)->isOwner(); }
  std::string owner_name() const { return detail::owner_name(native_); }
  /// Whether the owner knows of this reference.
  bool confirmed_by_owner() const { return detail::checked(native_)->confirmedByOwner(); }

  /// A copy of the value. Blocks until the owner has it. Throws what `Future::wait` does, and the
  /// failure of the function that was to make the value.
  T to_here(
      std::optional<std::chrono::milliseconds> timeout = std::nullopt) const requires Sendable<T> {
    return Value<T>::from(detail::fetch_value(native_, timeout));
  }

  /// The value itself, on its owner. Tensors share their memory with it. Blocks until it is there.
  /// Throws UsageError on another worker, TimeoutError after the time-out, by default
  /// Options::timeout, and the failure of the function that was to make the value.
  T local_value(
      std::optional<std::chrono::milliseconds> timeout = std::nullopt) const requires Sendable<T> {
    return Value<T>::from(detail::local_value(native_, timeout));
  }
  /// The object itself, which lives as long as the references to it.
  T& local_value(std::optional<std::chrono::milliseconds> timeout = std::nullopt) const
      requires(!Sendable<T>) {
    return *static_cast<T*>(
        detail::held_object(detail::local_value(native_, timeout), typeid(T)).get());
  }

  /// Calls a method where the object is, and waits for the result.
  template <class R, class... A, class... Given>
  auto rpc_sync(const Function<R(RRef<T>, A...)>& method, Given&&... arguments) const;
  /// The same without waiting.
  template <class R, class... A, class... Given>
  auto rpc_async(const Function<R(RRef<T>, A...)>& method, Given&&... arguments) const;
  /// The same; the result stays with the owner.
  template <class R, class... A, class... Given>
  auto remote(const Function<R(RRef<T>, A...)>& method, Given&&... arguments) const;

  explicit operator bool() const { return native_ != nullptr; }
  const detail::RRefPtr& native() const { return native_; }

 private:
  detail::RRefPtr native_;
};

template <class T>
struct Value<RRef<T>> {
  static std::string type() {
    if constexpr (Sendable<T>) {
      return "rref[" + Value<T>::type() + "]";
    } else {
      return std::string("rref[") + typeid(T).name() + "]";
    }
  }
  static at::IValue to(RRef<T> value) { return detail::checked(value.native()); }
  static RRef<T> from(const at::IValue& sent) { return RRef<T>(detail::rref_of(sent)); }
};

}  // namespace lockstep::rpc
