#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

namespace lockstep {

/// What ProcessGroup::all_reduce_values takes: every arithmetic type that can be written to.
template <class T>
concept Reducible = std::is_arithmetic_v<T> && !std::is_const_v<T> && !std::is_volatile_v<T>;

/// Refers to a number of any arithmetic type, which must outlive it.
class NumberReference {
 public:
  enum class Kind : uint8_t { boolean, signed_integer, unsigned_integer, floating };

  template <Reducible T>
  explicit NumberReference(T& number) : number_(&number), kind_(kind_of<T>()), bytes_(sizeof(T)) {}

  void* number() const { return number_; }
  Kind kind() const { return kind_; }
  /// Of the number's type, which kind and size determine on one machine.
  uint8_t bytes() const { return bytes_; }

 private:
  template <class T>
  static constexpr Kind kind_of() {
    if (std::is_same_v<T, bool>) return Kind::boolean;
    if (std::is_floating_point_v<T>) return Kind::floating;
    return std::is_signed_v<T> ? Kind::signed_integer : Kind::unsigned_integer;
  }

  void* number_;
  Kind kind_;
  uint8_t bytes_;
};

}  // namespace lockstep
