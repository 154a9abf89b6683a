#pragma once

#include "lockstep/comm/backends/call_queue.h"
#include "lockstep/comm/backends/hierarchical/hierarchy.h"
#include "lockstep/comm/backends/tensor_backend.h"

namespace lockstep::hierarchical {

using backends::Blocks;
using backends::bytes_of;
using backends::TensorLists;
using backends::Tensors;
using backends::TensorWork;

/// For ranks on several hosts, some of them on one. all_reduce, broadcast, all_gather,
/// reduce_scatter and barrier go by the hierarchy. They go through shared memory on each host and
/// by one leader per host between the hosts. CPU tensors of every dtype that shm takes, contiguous
/// or not. The results have the same bits on every rank and in every run.
///
/// Everything else goes by a group of all ranks over Gloo. So does what the hierarchy does not take
/// (sparse tensors). That group is checked by itself. It gets copies of tensors that are not
/// contiguous. A mismatch between ranks is named at every call of either kind, as far as Gloo's
/// group is compared.
class HierarchicalBackend final : public backends::TensorBackend {
 public:
  HierarchicalBackend(const BackendOptions& options, const HostLayout& layout,
                      const std::vector<Member>& members);
  ~HierarchicalBackend() override;

  const std::string getBackendName() const override { return "hierarchical"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  OwnWork make_work(backends::Request request) override;
  void submit(const OwnWork& work) override { queue_.submit(work); }
  void add_all_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op) override;
  void add_all_reduces(TensorWork& work, const Tensors& data, const c10d::ReduceOp& op) override;
  void add_broadcast(TensorWork& work, const at::Tensor& data, int root) override;
  void add_all_gather(TensorWork& work, const at::Tensor& input, Blocks outputs) override;
  void add_reduce_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output,
                          const c10d::ReduceOp& op) override;

  bool run(TensorWork& work);

  const std::shared_ptr<CheckContext> checks_;  ///< Of the flat group.
  Hierarchy hierarchy_;
  backends::CallQueue queue_;
  c10::intrusive_ptr<c10d::Backend> flat_;  ///< All ranks, over Gloo.
};

}  // namespace lockstep::hierarchical
