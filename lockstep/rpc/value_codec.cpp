#include "lockstep/rpc/value_codec.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/base/error.h"

namespace lockstep::rpc::detail {
namespace {

enum class Kind : uint8_t { none, no, yes, whole, real, text, tuple, tensor };
constexpr auto kLastKind = Kind::tensor;

/// A tensor's dimensions, at most.
constexpr size_t kMostDimensions = 64;
/// LibTorch's RPC copies a view first that has less than half of so large a storage.
constexpr size_t kLargeStorage = 8 * 1024;

bool travels(at::ScalarType type) {
  switch (type) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexHalf:
    case at::kComplexFloat:
    case at::kComplexDouble:
    case at::kBool:
    case at::kBFloat16:
      return true;
    default:
      return false;
  }
}

bool has_gradients(at::ScalarType type) {
  return c10::isFloatingType(type) || c10::isComplexType(type);
}

/// Of the CPU and dense, without names, conjugation, quantization or a class of its own.
bool is_plain(const at::Tensor& tensor) {
  static const uint64_t plain = [] {
    const c10::InferenceMode off(false);  // Else the first thread's mode would count for ever.
    return at::empty({0}).key_set().raw_repr();
  }();
  return tensor.defined() && (tensor.key_set().raw_repr() & ~plain) == 0 && tensor.has_storage() &&
         travels(tensor.scalar_type()) && static_cast<size_t>(tensor.dim()) <= kMostDimensions;
}

class Encoder {
 public:
  Encoder(const CodecLimits& limits, std::string& bytes) : limits_(limits), bytes_(bytes) {}

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

  bool tensor(const at::Tensor& given) {
    if (!is_plain(given)) return false;
    const size_t whole = given.storage().nbytes(), used = given.nbytes();
    if (whole < kLargeStorage || whole < 2 * used) return stored(given);
    if (!fits(used)) return false;
    copies_.push_back(given.detach().clone());
    return stored(copies_.back(), given.requires_grad());
  }

  bool stored(const at::Tensor& tensor) { return stored(tensor, tensor.requires_grad()); }
  bool stored(const at::Tensor& tensor, bool requires_grad) {
    put(Kind::tensor);
    put(tensor.scalar_type());
    put(static_cast<uint8_t>(requires_grad));
    put(static_cast<uint8_t>(tensor.dim()));
    for (const int64_t size : tensor.sizes()) put(size);
    for (const int64_t stride : tensor.strides()) put(stride);
    put(tensor.storage_offset());
    return storage(tensor.storage());
  }

  /// Its number, and its bytes when it is new.
  bool storage(const at::Storage& storage) {
    const void* const same = storage.unsafeGetStorageImpl();
    const auto found = std::find(storages_.begin(), storages_.end(), same);
    put(static_cast<uint32_t>(found - storages_.begin()));
    if (found != storages_.end()) return fits(0);
    storages_.push_back(same);
    const size_t size = storage.nbytes();
    if (!fits(size + sizeof(uint32_t))) return false;
    put(static_cast<uint32_t>(size));
    if (size > 0) bytes_.append(static_cast<const char*>(storage.data()), size);
    return true;
  }

  const CodecLimits limits_;
  std::string& bytes_;
  c10::SmallVector<const void*, 8> storages_;
  std::vector<at::Tensor> copies_;  ///< Kept: another one's storage must not get their address.
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
  int64_t get_size(const char* what) {
    const auto size = get<int64_t>();
    if (size < 0) fail(what);
    return size;
  }

  at::IValue value(int depth) {
    switch (static_cast<Kind>(std::min(get<uint8_t>(), static_cast<uint8_t>(kEnd)))) {
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
        return tensor();
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
    c10::SmallVector<int64_t, 5> sizes, strides;
    for (size_t i = 0; i < dimensions; ++i) sizes.push_back(get_size("a negative size"));
    for (size_t i = 0; i < dimensions; ++i) strides.push_back(get_size("a negative stride"));
    const int64_t offset = get_size("a negative offset");
    const at::Storage stored = storage();
    check_bounds(sizes, strides, offset, stored.nbytes() / c10::elementSize(type));
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        at::Storage(stored), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(type));
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    if (requires_grad == 1) made.set_requires_grad(true);
    return made;
  }

  at::Storage storage() {
    const auto number = get<uint32_t>();
    if (number < storages_.size()) return storages_[number];
    if (number > storages_.size()) fail("a storage out of order");
    const auto size = get<uint32_t>();
    const char* const bytes = take(size);
    storages_.emplace_back(at::Storage::use_byte_size_t(), size, c10::GetCPUAllocator(),
                           /*resizable=*/true);
    copy_bytes(storages_.back().mutable_data(), bytes, size);
    return storages_.back();
  }

  /// All elements lie within a storage of so many.
  void check_bounds(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> strides, int64_t offset,
                    size_t elements) const {
    int64_t count = 1, last = offset;
    bool fits = true, empty = false;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 0) empty = true;
      fits = fits && !__builtin_mul_overflow(count, std::max<int64_t>(sizes[i], 1), &count);
      int64_t way = 0;
      fits = fits && !__builtin_mul_overflow(std::max<int64_t>(sizes[i], 1) - 1, strides[i], &way);
      fits = fits && !__builtin_add_overflow(last, way, &last);
    }
    if (!fits) fail("a tensor of more elements than numbers can count");
    if (!empty && static_cast<size_t>(last) >= elements) {  // An empty one has no element there.
      fail("a tensor beyond its storage");
    }
  }

  static constexpr int kEnd = static_cast<int>(kLastKind) + 1;
  const std::string_view bytes_;
  size_t at_ = 0;
  c10::SmallVector<at::Storage, 8> storages_;
};

}  // namespace

bool encode_values(c10::ArrayRef<at::IValue> values, const CodecLimits& limits,
                   std::string& bytes) {
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

bool encode_request(const std::string& function, c10::ArrayRef<at::IValue> arguments,
                    const CodecLimits& limits, std::string& bytes) {
  constexpr size_t kRoom = 512;
  if (function.size() > UINT16_MAX) return false;
  const auto size = static_cast<uint16_t>(function.size());
  bytes.reserve(kRoom);
  bytes.append(reinterpret_cast<const char*>(&size), sizeof(size));
  bytes.append(function);
  return encode_values(arguments, {limits.bytes, limits.depth - 1}, bytes);
}

PlainRequest decode_request(std::string_view bytes, int depth) {
  uint16_t size = 0;
  if (bytes.size() < sizeof(size)) throw DataError("rpc: a request that ends too early");
  std::memcpy(&size, bytes.data(), sizeof(size));
  bytes.remove_prefix(sizeof(size));
  if (bytes.size() < size) throw DataError("rpc: a request whose function's name ends too early");
  return {std::string(bytes.substr(0, size)), decode_values(bytes.substr(size), depth - 1)};
}

}  // namespace lockstep::rpc::detail
