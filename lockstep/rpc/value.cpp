#include "lockstep/rpc/value.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "lockstep/base/error.h"

namespace lockstep::rpc::detail {

void throw_other_kind(const std::string& type, const at::IValue& value) {
  std::string kind = value.tagKind();
  if (value.isTuple()) {
    kind += " of " + std::to_string(value.toTupleRef().elements().size()) + " elements";
  } else if (value.isInt()) {
    kind += " " + std::to_string(value.toInt());
  } else if (value.isTensor() && value.toTensor().defined()) {
    kind += std::string(" of ") + c10::toString(value.toTensor().scalar_type()) + " with " +
            std::to_string(value.toTensor().dim()) + " dimensions";
  }
  throw DataError("rpc: expected a value of the type " + type + ", got " + kind);
}

std::vector<at::IValue> elements(const at::IValue& value, const std::string& type, int64_t size) {
  if (!value.isTuple()) throw_other_kind(type, value);
  const auto& parts = value.toTupleRef().elements();
  if (size >= 0 && static_cast<int64_t>(parts.size()) != size) throw_other_kind(type, value);
  return std::vector<at::IValue>(parts.begin(), parts.end());
}

at::IValue make_tuple(std::vector<at::IValue> elements) {
  return c10::ivalue::Tuple::create(std::move(elements));
}

at::Tensor number_tensor(const void* data, int64_t size, at::ScalarType dtype) {
  const at::Tensor tensor = at::empty({size}, at::TensorOptions().dtype(dtype));
  if (size > 0) std::memcpy(tensor.mutable_data_ptr(), data, tensor.nbytes());
  return tensor;
}

void copy_numbers(const at::IValue& value, const std::string& type, at::ScalarType dtype,
                  const std::function<void*(int64_t size)>& room) {
  if (!value.isTensor()) throw_other_kind(type, value);
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined() || tensor.scalar_type() != dtype || tensor.dim() != 1 ||
      !tensor.is_contiguous() || !tensor.is_cpu()) {
    throw_other_kind(type, value);
  }
  void* target = room(tensor.numel());
  if (tensor.numel() > 0) std::memcpy(target, tensor.const_data_ptr(), tensor.nbytes());
}

}  // namespace lockstep::rpc::detail
