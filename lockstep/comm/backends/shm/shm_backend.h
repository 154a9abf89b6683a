#pragma once

#include <atomic>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/backends/shm/shm_queue.h"
#include "lockstep/comm/shared_memory/messages.h"

namespace lockstep::shm {

/// See shm.h. Any thread may call; the ranks' calls must come in the same order.
class ShmBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  explicit ShmBackend(const BackendOptions& options);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

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

  /// See ProcessGroup::symmetric_empty. A collective.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override;
  void shutdown() override;

 private:
  using OwnWork = c10::intrusive_ptr<ShmWork>;

  OwnWork make_work(Request request, std::chrono::milliseconds timeout);
  WorkPtr submit(const OwnWork& work, std::unique_ptr<Plan> plan, bool async);
  std::unique_ptr<Plan> gather_into(ShmWork& work, const at::Tensor& output,
                                    const at::Tensor& input);
  std::unique_ptr<Plan> scatter_from(ShmWork& work, const at::Tensor& output,
                                     const at::Tensor& input, const c10d::ReduceOp& reduction);
  WorkPtr message(Operation operation, c10d::OpType type, Tensors& tensors, int peer, int tag);
  void close();

  std::shared_ptr<const GroupNames> names_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> sequence_{0};
  const c10::intrusive_ptr<c10d::Store> store_;  ///< Where the ranks meet for regions.
  size_t regions_made_ = 0;
  Regions regions_;
  SharedGroup group_;
  ShmQueue queue_;
  Messages messages_;
};

}  // namespace lockstep::shm
