#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/failure.h"
#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/backends/tensor_work.h"
#include "lockstep/comm/shared_memory/plans.h"

namespace lockstep::backends {

using shm::Buffers;

/// A backend of ours for CPU tensors, as c10d calls it. Each call is checked (UsageError, before
/// anything is sent) and becomes a work with contiguous memory. The backend gives the work the
/// operations that it consists of, and the work is submitted. Any thread may call. The ranks' calls
/// must come in the same order.
class TensorBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit TensorBackend(const BackendOptions& options);

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  /// Under which name calls show in LibTorch's traces, in place of the backend's own. Before the
  /// first call.
  void record_as(std::string name) { recorded_as_ = std::move(name); }
  /// See common_empty: undefined where the ranks have no memory in common. A collective.
  virtual at::Tensor allocate_common(int64_t, at::ScalarType) { return {}; }

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

 protected:
  using OwnWork = c10::intrusive_ptr<TensorWork>;
  static constexpr int kAnyRank = -1;

  // What a backend implements. Each `add` gives `work`, one of its `make_work`, an operation on
  // memory that lives as long as the work. A coalesced call gets several.

  virtual OwnWork make_work(Request request) = 0;
  /// Begins the call. What becomes of it is left in the work.
  virtual void submit(const OwnWork& work) = 0;
  /// In which dtype a reduction is done. Throws UsageError where the backend has none of `dtype`.
  virtual at::ScalarType reduction_dtype(at::ScalarType dtype, const c10d::ReduceOp&) const {
    return dtype;
  }
  /// What has no operations is a barrier, where this adds none.
  virtual void add_barrier(TensorWork&) {}
  /// In place.
  virtual void add_all_reduce(TensorWork& work, const at::Tensor& data,
                              const c10d::ReduceOp& op) = 0;
  virtual void add_all_reduces(TensorWork& work, const Tensors& data, const c10d::ReduceOp& op);
  virtual void add_broadcast(TensorWork& work, const at::Tensor& data, int root) = 0;
  /// `outputs`: of the input's size each.
  virtual void add_all_gather(TensorWork& work, const at::Tensor& input, Blocks outputs) = 0;
  /// `inputs`: of the output's size each.
  virtual void add_reduce_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output,
                                  const c10d::ReduceOp& op) = 0;
  /// Only the root's data changes, in place.
  virtual void add_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op,
                          int root) = 0;
  /// The lists are empty on all but the root.
  virtual void add_gather(TensorWork& work, const at::Tensor& input, Blocks outputs, int root) = 0;
  virtual void add_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output, int root) = 0;
  virtual void add_all_to_all(TensorWork& work, at::ScalarType dtype, Buffers sends,
                              Buffers receives) = 0;
  /// Begins a send or a receive; `peer`: kAnyRank for a receive from any.
  virtual WorkPtr message(Operation operation, const at::Tensor& tensor, int peer, int tag) = 0;

  /// A barrier to which all ranks come with the same operation and a tensor of this shape and
  /// dtype. Throws MismatchError on all of them otherwise.
  void agree(Operation operation, const at::Tensor& tensor);
  /// Where somebody watches, gives the call a title, and shows its sizes: also of messages, which
  /// are the backend's own.
  void show(Request& call) const;
  /// The request of a message.
  Request message_request(Operation operation, const at::Tensor& tensor, int peer) const;
  const std::shared_ptr<const GroupNames>& names() const { return names_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  /// As `reduction_dtype`, for a reduction that the tensor's dtype has.
  at::ScalarType reduced_dtype(Operation operation, const at::Tensor& tensor,
                               const c10d::ReduceOp& op) const;
  template <class CallOptions>
  OwnWork begin(Operation operation, const CallOptions& options, Request arguments);
  WorkPtr issue(const OwnWork& work);
  void meet(c10d::BarrierOptions options, Request call);
  WorkPtr gather_each(const OwnWork& work);
  WorkPtr scatter_each(const OwnWork& work, const c10d::ReduceOp& op);
  Blocks parts_of(const at::Tensor& whole) const;

  const std::shared_ptr<const GroupNames> names_;
  std::string recorded_as_;  ///< Empty: getBackendName().
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace lockstep::backends
