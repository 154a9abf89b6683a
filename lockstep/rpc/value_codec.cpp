#include "lockstep/rpc/value_codec.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/base/error.h"

namespace lockstep::rpc::detail {
namespace {

enum class Kind : uint8_t { none, no, yes, whole, real, text, tuple, tensor, again };

/// A tensor's dimensions, at most.
constexpr size_t kMostDimensions = 64;

bool travels(at::ScalarType type) {
  return (type >= at::kByte && type <= at::kBool) || type == at::kBFloat16;
}

bool has_gradients(at::ScalarType type) {
  return c10::isFloatingType(type) || c10::isComplexType(type);
}

/// Of the CPU, dense and contiguous, without names, conjugation, quantization or a class of its
/// own.
bool is_plain(const at::Tensor& tensor) {
  static const uint64_t plain = [] {
    const c10::InferenceMode off(false);  // Else the first thread's mode would count for ever.
    return at::empty({0}).key_set().raw_repr();
  }();
  return tensor.defined() && (tensor.key_set().raw_repr() & ~plain) == 0 && tensor.has_storage() &&
         tensor.is_contiguous() && travels(tensor.scalar_type()) &&
         static_cast<size_t>(tensor.dim()) <= kMostDimensions;
}

class Encoder {
 public:
  Encoder(const MessageLimits& limits, std::string& bytes) : limits_(limits), bytes_(bytes) {}

  bool values(c10::ArrayRef<at::IValue> values, int depth) {
    if (values.size() > UINT32_MAX) return false;
    put(static_cast<uint32_t>(values.size()));
    return std::all_of(values.begin(), values.end(),
                       [&](const at::IValue& one) { return value(one, depth); });
  }

 private:
  template <class T>
  void put(T number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  template <class T>
  bool put_as(Kind kind, T number) {
    put(kind);
    put(number);
    return fits(0);
  }
  bool fits(size_t more) const {
    return bytes_.size() <= limits_.bytes && more <= limits_.bytes - bytes_.size();
  }

  bool value(const at::IValue& value, int depth) {
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isInt()) return put_as(Kind::whole, value.toInt());
    if (value.isDouble()) return put_as(Kind::real, value.toDouble());
    if (value.isString()) return text(value.toStringRef());
    if (value.isTuple()) {
      put(Kind::tuple);
      return depth > 0 && values(value.toTupleRef().elements().asArrayRef(), depth - 1);
    }
    if (value.isNone()) {
      put(Kind::none);
    } else if (value.isBool()) {
      put(value.toBool() ? Kind::yes : Kind::no);
    } else {
      return false;
    }
    return fits(0);
  }

  bool text(const std::string& text) {
    if (!fits(text.size())) return false;
    put_as(Kind::text, static_cast<uint32_t>(text.size()));
    bytes_.append(text);
    return fits(0);
  }

  bool tensor(const at::Tensor& tensor) {
    if (!is_plain(tensor) || !fits(tensor.nbytes())) return false;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensor.is_same(*tensors_[i])) return put_as(Kind::again, static_cast<uint32_t>(i));
      // What two of them share is kept LibTorch's way only.
      if (tensor.is_alias_of(*tensors_[i])) return false;
    }
    tensors_.push_back(&tensor);
    put(Kind::tensor);
    put(tensor.scalar_type());
    put(static_cast<uint8_t>(tensor.requires_grad()));
    put(static_cast<uint8_t>(tensor.dim()));
    for (const int64_t size : tensor.sizes()) put(size);
    if (tensor.numel() > 0)
      bytes_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    return fits(0);
  }

  const MessageLimits limits_;
  std::string& bytes_;
  c10::SmallVector<const at::Tensor*, 8> tensors_;
};

class Decoder {
 public:
  explicit Decoder(std::string_view bytes) : bytes_(bytes) {}

  std::vector<at::IValue> values(int depth) {
    const auto count = get<uint32_t>();
    // Each has at least the byte of its kind.
    if (count > bytes_.size() - at_) fail("a count beyond the end");
    std::vector<at::IValue> all;
    all.reserve(count);
    for (uint32_t i = 0; i < count; ++i) all.push_back(value(depth));
    return all;
  }
  void end() const {
    if (at_ != bytes_.size()) fail("bytes behind its end");
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw DataError("rpc: a message that cannot be read: " + std::string(what) + ", at byte " +
                    std::to_string(at_) + " of " + std::to_string(bytes_.size()));
  }

  const char* take(size_t size) {
    if (size > bytes_.size() - at_) fail("a length beyond the end");
    const char* const place = bytes_.data() + at_;
    at_ += size;
    return place;
  }
  template <class T>
  T get() {
    T number;
    std::memcpy(&number, take(sizeof(number)), sizeof(number));
    return number;
  }
  at::IValue value(int depth) {
    switch (get<Kind>()) {
      case Kind::none:
        return {};
      case Kind::no:
        return false;
      case Kind::yes:
        return true;
      case Kind::whole:
        return get<int64_t>();
      case Kind::real:
        return get<double>();
      case Kind::text: {
        const auto size = get<uint32_t>();
        return std::string(take(size), size);
      }
      case Kind::tuple:
        if (depth <= 0) fail("values within values deeper than the limit");
        return c10::ivalue::Tuple::create(values(depth - 1));
      case Kind::tensor:
        return tensors_.emplace_back(tensor());
      case Kind::again: {
        const auto number = get<uint32_t>();
        if (number >= tensors_.size()) fail("a tensor that did not come before");
        return tensors_[number];
      }
    }
    fail("a value of an unknown kind");
  }

  at::Tensor tensor() {
    const auto type = static_cast<at::ScalarType>(get<int8_t>());
    if (!travels(type)) fail("a tensor of an unknown type");
    const auto requires_grad = get<uint8_t>();
    if (requires_grad > 1 || (requires_grad == 1 && !has_gradients(type))) {
      fail("a tensor that cannot have gradients");
    }
    const size_t dimensions = get<uint8_t>();
    if (dimensions > kMostDimensions) fail("a tensor of too many dimensions");
    c10::SmallVector<int64_t, 5> sizes;
    int64_t bytes = static_cast<int64_t>(c10::elementSize(type));
    for (size_t i = 0; i < dimensions; ++i) {
      sizes.push_back(get<int64_t>());
      // Also of an empty one LibTorch computes strides.
      const int64_t count = std::max<int64_t>(sizes.back(), 1);
      if (sizes.back() < 0 || __builtin_mul_overflow(bytes, count, &bytes)) {
        fail("a tensor of more elements than numbers can count");
      }
    }
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    const char* const data = take(empty ? 0 : static_cast<size_t>(bytes));
    const at::Tensor made = at::detail::empty_cpu(sizes, type);
    if (!empty) copy_bytes(made.mutable_data_ptr(), data, static_cast<size_t>(bytes));
    if (requires_grad == 1) made.set_requires_grad(true);
    return made;
  }

  const std::string_view bytes_;
  size_t at_ = 0;
  c10::SmallVector<at::Tensor, 8> tensors_;
};

}  // namespace

bool encode_values(c10::ArrayRef<at::IValue> values, const MessageLimits& limits,
                   std::string& bytes) {
  constexpr size_t kRoom = 512;
  bytes.reserve(kRoom);
  try {
    return Encoder(limits, bytes).values(values, limits.depth);
  } catch (const c10::Error&) {  // A tensor that lets nobody see its memory.
    return false;
  }
}

std::vector<at::IValue> decode_values(std::string_view bytes, int depth) {
  // A thread that waits for another call may do it, and its mode is not that of this call.
  const c10::InferenceMode off(false);
  Decoder decoder(bytes);
  auto values = decoder.values(depth);
  decoder.end();
  return values;
}

}  // namespace lockstep::rpc::detail
