#include "lockstep/comm/backends/sparse_all_reduce.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"

namespace lockstep::backends {

void all_reduce_sparse(std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op, int size,
                       const std::function<void(at::Tensor& output, at::Tensor& input)>& gather) {
  if (tensors.size() != 1 || !tensors[0].is_sparse() || !tensors[0].is_cpu())
    throw UsageError("all_reduce of sparse tensors: expected one sparse tensor of the CPU");
  if (op.op_ != c10d::ReduceOp::SUM && op.op_ != c10d::ReduceOp::AVG)
    throw UsageError("all_reduce of sparse tensors: they are summed or averaged only");
  const auto gather_all = [&](at::Tensor input) {
    std::vector<int64_t> shape = input.sizes().vec();
    shape.insert(shape.begin(), size);
    at::Tensor all = at::empty(shape, input.options());
    gather(all, input);
    return all;
  };
  const at::Tensor mine = tensors[0].coalesce();
  const at::Tensor counts = gather_all(at::full({1}, mine._nnz(), at::kLong));
  const int64_t most = counts.max().item<int64_t>();
  const auto padded = [&](const at::Tensor& values, int64_t dim) {
    std::vector<int64_t> shape = values.sizes().vec();
    shape[static_cast<size_t>(dim)] = most;
    at::Tensor result = at::zeros(shape, values.options());
    result.narrow(dim, 0, mine._nnz()).copy_(values);
    return result;
  };
  const at::Tensor indices = gather_all(padded(mine.indices(), 1));
  const at::Tensor values = gather_all(padded(mine.values(), 0));
  at::Tensor sum;
  for (int rank = 0; rank < size; ++rank) {
    const int64_t count = counts[rank].item<int64_t>();
    const at::Tensor one =
        at::sparse_coo_tensor(indices[rank].narrow(1, 0, count), values[rank].narrow(0, 0, count),
                              mine.sizes(), mine.options());
    sum = rank == 0 ? one : sum + one;
  }
  if (op.op_ == c10d::ReduceOp::AVG) sum = sum / size;
  tensors[0].copy_(sum.coalesce());
}

}  // namespace lockstep::backends
