#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

/// Numbers, lists and texts one after the other, for processes of one byte order.
class ByteWriter {
 public:
  template <class T>
  void number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void count(size_t value) { number(static_cast<uint32_t>(value)); }
  void text(std::string_view value) {
    count(value.size());
    bytes_ += value;
  }
  template <class Range>
  void numbers(const Range& values) {
    count(values.size());
    for (const auto value : values) number(value);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// Reads what a ByteWriter wrote, from memory that must outlive it. Behind the end all is 0 or
/// empty, and `ok` false.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T number() {
    T value{};
    if (const auto from = take(sizeof(T)); ok_) std::memcpy(&value, from.data(), sizeof(T));
    return value;
  }
  std::string_view text() { return take(number<uint32_t>()); }
  /// Calls `f` as often as a count says that comes next.
  template <class F>
  void times(F f) {
    for (auto left = number<uint32_t>(); left > 0 && ok_; --left) f();
  }
  template <class T>
  std::vector<T> numbers() {
    std::vector<T> values;
    times([&] { values.push_back(number<T>()); });
    return values;
  }
  void expect(bool holds) { ok_ = ok_ && holds; }
  bool ok() const { return ok_; }
  bool at_end() const { return bytes_.empty(); }

 private:
  std::string_view take(size_t count) {
    expect(count <= bytes_.size());
    if (!ok_) return {};
    const auto taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }

  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace lockstep
