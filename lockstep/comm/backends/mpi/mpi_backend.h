#pragma once

#include <atomic>
#include <memory>

#include "lockstep/comm/backends/mpi/mpi_engine.h"
#include "lockstep/comm/backends/mpi/mpi_work.h"
#include "lockstep/comm/backends/tensor_backend.h"

namespace lockstep::mpi {

struct MpiBackendOptions {
  /// Larger all-reduces, reduces and broadcasts are cut into pieces of so many elements. MPI counts
  /// in ints. Its algorithms also take a buffer of the piece's size, which for a large piece costs
  /// more than the messages do. 64 MB whole took three times as long as in pieces of 4 MB.
  int64_t piece = int64_t{1} << 20;
};

using backends::Blocks;
using backends::Buffers;
using backends::TensorWork;

/// See mpi.h. Sums are MPI's: the same bits in every run with as many ranks, but in an order that
/// MPI chooses by size.
class MpiBackend final : public backends::TensorBackend {
 public:
  explicit MpiBackend(const BackendOptions& options, MpiBackendOptions own = {});
  ~MpiBackend() override;

  const std::string getBackendName() const override { return "mpi"; }
  void abort() override { close(/*abort=*/true); }
  void shutdown() override { close(/*abort=*/false); }

 private:
  OwnWork make_work(backends::Request request) override;
  void submit(const OwnWork& work) override;
  at::ScalarType reduction_dtype(at::ScalarType dtype, const c10d::ReduceOp& op) const override;
  void add_barrier(TensorWork& work) override;
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

  /// Adds one operation for each piece of a contiguous tensor.
  template <class Start>
  void add_pieces(TensorWork& work, const char* call, const at::Tensor& data, Start start);
  void close(bool abort);

  const MpiBackendOptions own_;
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Group> group_;
  std::atomic<bool> closed_{false};
};

}  // namespace lockstep::mpi
