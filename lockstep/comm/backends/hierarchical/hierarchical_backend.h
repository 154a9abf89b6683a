#pragma once

#include "lockstep/comm/backends/call_queue.h"
#include "lockstep/comm/backends/hierarchical/hierarchy.h"
#include "lockstep/comm/backends/tensor_backend.h"

namespace lockstep::hierarchical {

using backends::Blocks;
using backends::bytes_of;
using backends::Tensors;
using backends::TensorWork;

/// For ranks on several hosts, some of them on one. Collectives go by the hierarchy: through shared
/// memory on each host, and by one leader per host between them. CPU tensors of every dtype that
/// shm takes, contiguous or not. The results have the same bits on every rank and in every run. The
/// ranks' calls are compared at every collective.
///
/// Sends and receives go by a group of all ranks over Gloo. It compares the first messages of each
/// sender, receiver and tag, and gets copies of tensors that are not contiguous.
class HierarchicalBackend final : public backends::TensorBackend {
 public:
  HierarchicalBackend(const BackendOptions& options, const HostLayout& layout);
  ~HierarchicalBackend() override;

  const std::string getBackendName() const override { return "hierarchical"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;

 private:
  OwnWork make_work(backends::Request request) override;
  void submit(const OwnWork& work) override { queue_.submit(work); }
  at::ScalarType reduction_dtype(at::ScalarType dtype, const c10d::ReduceOp& op) const override;
  void add_all_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op) override;
  void add_all_reduces(TensorWork& work, const Tensors& data, const c10d::ReduceOp& op) override;
  void add_broadcast(TensorWork& work, const at::Tensor& data, int root) override;
  void add_all_gather(TensorWork& work, const at::Tensor& input, Blocks outputs) override;
  void add_reduce_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output,
                          const c10d::ReduceOp& op) override;
  void add_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op,
                  int root) override;
  void add_gather(TensorWork& work, const at::Tensor& input, Blocks outputs, int root) override;
  void add_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output, int root) override;
  void add_all_to_all(TensorWork& work, at::ScalarType, backends::Buffers sends,
                      backends::Buffers receives) override;
  WorkPtr message(Operation operation, const at::Tensor& tensor, int peer, int tag) override;

  bool run(TensorWork& work);

  const std::shared_ptr<CheckContext> checks_;  ///< Of the flat group.
  Hierarchy hierarchy_;
  backends::CallQueue queue_;
  c10::intrusive_ptr<c10d::Backend>
      flat_;  ///< All ranks, over Gloo: for messages, and between leaders.
};

}  // namespace lockstep::hierarchical
