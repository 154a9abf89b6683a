#include "lockstep/comm/backends/hierarchical/tensor_joining.h"

#include <ATen/ATen.h>

#include "lockstep/comm/backends/shm/tensor_reduction.h"
#include "lockstep/comm/backends/tensor_work.h"

namespace lockstep::hierarchical {

Joining joining_of(const at::Tensor& tensor, const c10d::ReduceOp& op, int ranks) {
  const at::ScalarType type = tensor.scalar_type();
  const bool average = op.op_ == c10d::ReduceOp::AVG;
  Joining joining;
  joining.type = shm::data_type(type);
  joining.kernel = shm::kernel_for(type, average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op);
  if (average)
    joining.divide = [type, ranks](std::byte* data, size_t count) {
      backends::divide(at::from_blob(data, {static_cast<int64_t>(count)}, type), ranks);
    };
  return joining;
}

}  // namespace lockstep::hierarchical
