#include "lockstep/comm/backends/hierarchical/tensor_joining.h"

#include <ATen/ATen.h>

#include "lockstep/comm/backends/shm/tensor_reduction.h"

namespace lockstep::hierarchical {
namespace {

// As shm's kernels do it: integers towards zero, the parts of a complex number each by itself.
void divide(std::byte* data, size_t count, at::ScalarType type, int ranks) {
  at::Tensor values = at::from_blob(data, {static_cast<int64_t>(count)}, type);
  if (values.is_complex()) values = at::view_as_real(values);
  if (at::isIntegralType(type, false)) {
    values.div_(ranks, "trunc");
  } else {
    values.div_(ranks);
  }
}

}  // namespace

Joining joining_of(const at::Tensor& tensor, const c10d::ReduceOp& op, int ranks) {
  const at::ScalarType type = tensor.scalar_type();
  shm::kernel_for(type, op);  // Whether the dtype has it.
  const bool average = op.op_ == c10d::ReduceOp::AVG;
  Joining joining;
  joining.type = shm::data_type(type);
  joining.kernel = shm::kernel_for(type, average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op);
  if (average)
    joining.divide = [type, ranks](std::byte* data, size_t count) {
      divide(data, count, type, ranks);
    };
  return joining;
}

}  // namespace lockstep::hierarchical
