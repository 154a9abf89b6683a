#pragma once

#include <atomic>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/backends/mpi/mpi_engine.h"
#include "lockstep/comm/backends/mpi/mpi_types.h"
#include "lockstep/comm/backends/mpi/mpi_work.h"

namespace lockstep::mpi {

struct MpiBackendOptions {
  /// Larger all-reduces, reduces and broadcasts are cut into pieces of so many elements: MPI counts
  /// in ints, and its algorithms take a buffer of the piece's size, which for a large piece costs
  /// more than the messages do (64 MB whole took three times as long as in pieces of 4 MB).
  int64_t piece = int64_t{1} << 20;
};

/// See mpi.h. Any thread may call; the ranks' calls must come in the same order. Sums are MPI's:
/// the same bits in every run with as many ranks, but in an order that MPI chooses by size.
class MpiBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  explicit MpiBackend(const BackendOptions& options, MpiBackendOptions own = {});
  ~MpiBackend() override;

  const std::string getBackendName() const override { return "mpi"; }
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

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override { close(/*abort=*/true); }
  void shutdown() override { close(/*abort=*/false); }

 private:
  using OwnWork = c10::intrusive_ptr<MpiWork>;

  OwnWork make_work(Operation operation, Tensors results, std::chrono::milliseconds timeout);
  WorkPtr submit(OwnWork work);
  void add_all_reduce(MpiWork& work, const char* operation, const at::Tensor& tensor,
                      const c10d::ReduceOp& op);
  void add_all_gather(MpiWork& work, const char* operation, const at::Tensor& output,
                      const at::Tensor& input);
  void add_reduce_scatter(MpiWork& work, const char* operation, const at::Tensor& output,
                          const at::Tensor& input, const c10d::ReduceOp& op);
  void add_all_to_all(MpiWork& work, const Tensors& outputs, const Tensors& inputs);
  WorkPtr message(Operation operation, Tensors& tensors, int peer, int tag);
  void close(bool abort);

  const MpiBackendOptions own_;
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Group> group_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace lockstep::mpi
