// The calls of MpiBackend in which each two ranks exchange something of their own, and sparse sums.
#include <ATen/ATen.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/mpi/mpi_backend.h"
#include "lockstep/comm/backends/sparse_all_reduce.h"
#include "lockstep/comm/backends/tensor_checks.h"

namespace lockstep::mpi {

using namespace backends;
namespace {

using Tensors = std::vector<at::Tensor>;

/// One side of MPI_Ialltoallw: where the part of each rank lies, as types of absolute addresses, so
/// that parts of any tensors, of any size, need no copy.
struct Parts {
  std::vector<int> counts;
  std::vector<int> zeros;
  std::vector<MPI_Datatype> types;
};

/// Runs on the MPI thread, as all that calls MPI.
int make_parts(const Tensors& tensors, MPI_Datatype type, Parts& parts) {
  parts.zeros.assign(tensors.size(), 0);
  for (const auto& tensor : tensors) {
    MPI_Datatype part = MPI_BYTE;
    if (tensor.numel() > 0) {
      int length = static_cast<int>(tensor.numel());
      MPI_Aint address = 0;
      int code = MPI_Get_address(tensor.data_ptr(), &address);
      if (code == MPI_SUCCESS) code = MPI_Type_create_hindexed(1, &length, &address, type, &part);
      if (code == MPI_SUCCESS) code = MPI_Type_commit(&part);
      if (code != MPI_SUCCESS) return code;
    }
    parts.counts.push_back(tensor.numel() > 0 ? 1 : 0);
    parts.types.push_back(part);
  }
  return MPI_SUCCESS;
}

void free_parts(MpiWork& work, const Parts& parts) {
  for (size_t i = 0; i < parts.types.size(); ++i) {
    if (parts.counts[i] > 0) work.free_at_end(parts.types[i]);
  }
}

/// The rows of a contiguous tensor that go to or come from each rank: by `splits`, even parts
/// without.
Tensors cut(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  const auto n = static_cast<size_t>(size);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const bool even = splits.empty();
  int64_t sum = 0;
  for (const int64_t split : splits) sum += split;
  const bool negative = std::any_of(splits.begin(), splits.end(), [](int64_t s) { return s < 0; });
  if (even ? rows % size != 0 : splits.size() != n || sum != rows || negative)
    throw UsageError("all_to_all_single: the splits do not cut " + std::to_string(rows) +
                     " rows into " + std::to_string(size) + " parts");
  const at::Tensor table = tensor.dim() == 0 ? tensor.view({1}) : tensor;
  Tensors parts;
  int64_t row = 0;
  for (size_t rank = 0; rank < n; ++rank) {
    const int64_t count = even ? rows / size : splits[rank];
    parts.push_back(table.narrow(0, row, count));
    row += count;
  }
  return parts;
}

}  // namespace

// As every rank knows only its own splits, all must take the same call whatever they are.
void MpiBackend::add_all_to_all(MpiWork& work, const Tensors& outputs, const Tensors& inputs) {
  const MPI_Datatype type = moved_type(inputs[0]);
  auto sends = std::make_shared<Parts>(), receives = std::make_shared<Parts>();
  for (const auto& input : inputs) work.bytes += input.nbytes();
  work.add("MPI_Ialltoallw", [=, &work](MPI_Comm comm, MPI_Request* request) {
    int code = make_parts(inputs, type, *sends);
    if (code == MPI_SUCCESS) code = make_parts(outputs, type, *receives);
    free_parts(work, *sends);
    free_parts(work, *receives);
    if (code != MPI_SUCCESS) return code;
    return MPI_Ialltoallw(MPI_BOTTOM, sends->counts.data(), sends->zeros.data(),
                          sends->types.data(), MPI_BOTTOM, receives->counts.data(),
                          receives->zeros.data(), receives->types.data(), comm, request);
  });
  // MPI reads the lists until it is done.
  work.afterwards([sends, receives] {});
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  const char* name = "all_to_all_single";
  check_dense(name, output);
  check_dense(name, input);
  if (output.scalar_type() != input.scalar_type())
    throw UsageError(std::string(name) + ": the output is " + describe(signature_of(output)) +
                     ", the input " + describe(signature_of(input)));
  cut(input, input_splits, getSize());
  cut(output, output_splits, getSize());
  count_of(name, std::max(input.numel(), output.numel()));
  auto work = make_work(Operation::all_to_all_single, {output}, options.timeout);
  const at::Tensor from = work->given(input, input.scalar_type());
  const at::Tensor to = work->taken(output, output.scalar_type(), false);
  add_all_to_all(*work, cut(to, output_splits, getSize()), cut(from, input_splits, getSize()));
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  const char* name = "all_to_all";
  only_list(name, {outputs}, getSize());
  only_list(name, {inputs}, getSize());
  for (const auto* list : {&inputs, &outputs}) {
    for (const auto& tensor : *list) {
      count_of(name, tensor.numel());
      if (tensor.scalar_type() != inputs[0].scalar_type())
        throw UsageError(std::string(name) + ": tensors of several dtypes");
    }
  }
  auto work = make_work(Operation::all_to_all, outputs, options.timeout);
  Tensors from, to;
  for (const auto& input : inputs) from.push_back(work->given(input, input.scalar_type()));
  for (const auto& output : outputs) to.push_back(work->taken(output, output.scalar_type(), false));
  add_all_to_all(*work, to, from);
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::allreduce_sparse(Tensors& tensors,
                                                 const c10d::AllreduceOptions& options) {
  c10d::AllgatherOptions gather;
  gather.timeout = options.timeout;
  all_reduce_sparse(tensors, options.reduceOp, getSize(), [&](at::Tensor& all, at::Tensor& mine) {
    _allgather_base(all, mine, gather)->wait();
  });
  auto work = make_work(Operation::all_reduce_sparse, tensors, options.timeout);
  work->complete(nullptr);
  return work;
}

MpiBackend::WorkPtr MpiBackend::message(Operation operation, Tensors& tensors, int peer, int tag) {
  const std::string name(operation_name(operation));
  const at::Tensor& tensor = only(name.c_str(), tensors);
  if (peer != MPI_ANY_SOURCE) check_peer(name.c_str(), peer, getSize());
  if (tag < 0 || tag > engine_->largest_tag())
    throw UsageError(name + ": the tag " + std::to_string(tag) + " is not from 0 to " +
                     std::to_string(engine_->largest_tag()));
  const int count = count_of(name.c_str(), tensor.numel());
  const MPI_Datatype type = moved_type(tensor);
  auto work = make_work(operation, tensors, c10d::kUnsetTimeout);
  if (operation == Operation::send) {
    const at::Tensor data = work->given(tensor, tensor.scalar_type());
    work->add("MPI_Isend", [=, from = data.data_ptr()](MPI_Comm comm, MPI_Request* request) {
      return MPI_Isend(from, count, type, peer, tag, comm, request);
    });
  } else {
    const at::Tensor data = work->taken(tensor, tensor.scalar_type(), false);
    work->expect(count, type);
    work->add("MPI_Irecv", [=, to = data.data_ptr()](MPI_Comm comm, MPI_Request* request) {
      return MPI_Irecv(to, count, type, peer, tag, comm, request);
    });
  }
  work->bytes = tensor.nbytes();
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int dst, int tag) {
  return message(Operation::send, tensors, dst, tag);
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int src, int tag) {
  return message(Operation::recv, tensors, src, tag);
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(Operation::recv_any, tensors, MPI_ANY_SOURCE, tag);
}

}  // namespace lockstep::mpi
