#pragma once

#include "lockstep/comm/backends/shm/shm_work.h"
#include "lockstep/comm/backends/tensor_backend.h"

namespace lockstep::shm {

using backends::Blocks;
using backends::bytes_of;
using backends::TensorWork;

/// See shm.h.
class ShmBackend final : public backends::TensorBackend {
 public:
  explicit ShmBackend(const BackendOptions& options);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  /// See ProcessGroup::symmetric_empty. A collective.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocate_common(int64_t numel, at::ScalarType dtype) override;
  void abort() override;
  void shutdown() override;

 private:
  OwnWork make_work(backends::Request request) override;
  void submit(const OwnWork& work) override;
  at::ScalarType reduction_dtype(at::ScalarType dtype, const c10d::ReduceOp& op) const override;
  void add_all_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op) override;
  void add_broadcast(TensorWork& work, const at::Tensor& data, int root) override;
  void add_all_gather(TensorWork& work, const at::Tensor& input, Blocks outputs) override;
  void add_reduce_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output,
                          const c10d::ReduceOp& op) override;
  void add_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op,
                  int root) override;
  void add_gather(TensorWork& work, const at::Tensor& input, Blocks outputs, int root) override;
  void add_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output, int root) override;
  void add_all_to_all(TensorWork& work, at::ScalarType dtype, Buffers sends,
                      Buffers receives) override;
  WorkPtr message(Operation operation, const at::Tensor& tensor, int peer, int tag) override;

  /// A region in which each rank's part has so many bytes. `what` is asked for, for messages. A
  /// collective.
  std::shared_ptr<const Region> make_region(size_t part_bytes, const std::string& what);

  const std::shared_ptr<const std::atomic<int64_t>> steps_;  ///< BackendOptions::steps.
  const c10::intrusive_ptr<c10d::Store> store_;              ///< Where the ranks meet for regions.
  const size_t inline_bytes_;                                ///< See ShmWork.
  size_t regions_made_ = 0;
  Regions regions_;
  SharedGroup group_;
  backends::CallQueue queue_;
  Messages messages_;
};

}  // namespace lockstep::shm
