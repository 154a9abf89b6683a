#include "lockstep/comm/backends/gloo/gloo_dtypes.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::gloo {
namespace {

using Op = c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

bool knows(at::ScalarType dtype) {
  constexpr std::array kKnown{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
                              at::kByte,  at::kBool,   at::kInt,  at::kLong};
  return std::ranges::find(kKnown, dtype) != kKnown.end();
}

/// What to do about it; empty where Gloo has the reduction.
std::string remedy(at::ScalarType dtype, Op::RedOpType op) {
  const bool bitwise = op >= Op::BAND && op <= Op::BXOR;
  if (op == Op::PREMUL_SUM) return "scale the tensor before and use sum";
  if (at::isComplexType(dtype))
    return op == Op::SUM || op == Op::AVG ? "" : "complex numbers have sum and avg only";
  if (!knows(dtype)) {
    const bool whole = at::isIntegralType(dtype, /*includeBool=*/false);
    return std::string("convert the tensor first, for instance to ") +
           (whole ? "int64: tensor.to(at::kLong)" : "float32: tensor.to(at::kFloat)");
  }
  const bool fractions = at::isFloatingType(dtype);
  if (bitwise && fractions) return "bitwise reductions are for integers and bool";
  if (op == Op::AVG && !fractions) return "use sum and divide, or convert the tensor to float32";
  return {};
}

template <class Each>
std::vector<Each> each_movable(const std::vector<Each>& list) {
  std::vector<Each> all;
  all.reserve(list.size());
  for (const auto& one : list) all.push_back(movable(one));
  return all;
}

}  // namespace

at::Tensor movable(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || knows(tensor.scalar_type()))
    return tensor;
  const at::AutoDispatchBelowADInplaceOrView outside_autograd;
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kHalf);
    case 4:
      return tensor.view(at::kInt);
    case 8:
      return tensor.view(at::kLong);
    default:
      return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  }
}

Tensors movable(const Tensors& tensors) {
  return each_movable(tensors);
}

std::vector<Tensors> movable(const std::vector<Tensors>& lists) {
  return each_movable(lists);
}

Op reduction_of(int rank, Operation operation, const Op& op, const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (const std::string hint = remedy(dtype, op.op_); !hint.empty()) {
    const CallSignature call{operation, op.op_, -1, 0, {signature_of(tensor)}, {}, {}, {}};
    throw UsageError("rank " + std::to_string(rank) + ": " + describe(call, {}) +
                         ": gloo does not have this reduction of this dtype",
                     hint);
  }
  if (dtype != at::kBool) return op;
  return op.op_ == Op::SUM ? Op(Op::MAX) : op.op_ == Op::PRODUCT ? Op(Op::MIN) : op;
}

}  // namespace lockstep::gloo
