#pragma once

#include <atomic>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/backends/hierarchical/call_queue.h"
#include "lockstep/comm/backends/hierarchical/hierarchy.h"

namespace lockstep::hierarchical {

/// For ranks on several hosts, some of them on one. all_reduce, broadcast, all_gather,
/// reduce_scatter and barrier go by the hierarchy: through shared memory on each host, and by one
/// leader a host between them. CPU tensors of every dtype that shm takes, contiguous or not. The
/// results have the same bits on every rank and in every run.
///
/// Everything else, and what the hierarchy does not take (sparse tensors), goes by a group of all
/// ranks over Gloo, which is checked by itself. A mismatch between ranks is named at every call of
/// either kind, as far as Gloo's group is compared.
///
/// Any thread may call; the ranks' calls must come in the same order.
class HierarchicalBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  HierarchicalBackend(const BackendOptions& options, const HostLayout& layout,
                      const std::vector<Member>& members);
  ~HierarchicalBackend() override;

  const std::string getBackendName() const override { return "hierarchical"; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override;
  void shutdown() override;

 private:
  using OwnWork = c10::intrusive_ptr<shm::ShmWork>;

  OwnWork make_work(shm::Request request, std::chrono::milliseconds timeout);
  WorkPtr submit(const OwnWork& work, CallQueue::Body body, bool async);
  CallQueue::Body gather_into(shm::ShmWork& work, const at::Tensor& output,
                              const at::Tensor& input);
  CallQueue::Body scatter_from(shm::ShmWork& work, const at::Tensor& output,
                               const at::Tensor& input, const c10d::ReduceOp& op);

  std::shared_ptr<const shm::GroupNames> names_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> sequence_{0};
  const std::shared_ptr<CheckContext> checks_;  ///< Of the flat group.
  Hierarchy hierarchy_;
  CallQueue queue_;
  c10::intrusive_ptr<c10d::Backend> flat_;  ///< All ranks, over Gloo.
};

}  // namespace lockstep::hierarchical
