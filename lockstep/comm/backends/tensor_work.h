#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "lockstep/base/call_origin.h"
#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/flight_recorder.h"
#include "lockstep/comm/shared_memory/shared_group.h"

namespace lockstep::backends {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
/// The memory of a list of tensors of one size, one per rank.
using Blocks = std::vector<std::byte*>;

inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

/// A call of this rank, with the caller's own tensors.
struct Request {
  Operation operation = Operation::barrier;
  int reduction = -1;  ///< c10d::ReduceOp::RedOpType; -1: none.
  int root = -1;       ///< For a message the other rank; -1: none, or any.
  Tensors inputs = {};
  Tensors outputs = {};  ///< Where they are others than the inputs.
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
  std::chrono::milliseconds timeout{};  ///< Above 0.
  bool async = true;                    ///< False: the caller waits for the end at once.
  /// As which it shows in LibTorch's traces until its end: "shm:all_reduce". Empty: it does not.
  std::string title = {};
};

/// What all works of a group say about themselves. Outlives them.
struct GroupNames {
  RankNames ranks;
  std::string group;
  std::shared_ptr<const std::atomic<int64_t>> steps;  ///< BackendOptions::steps.
};
std::shared_ptr<const GroupNames> names_of(const BackendOptions& options);

/// Gives a caller's tensor the values of another, outside autograd: also a leaf that requires a
/// gradient can be a result.
void write_to(const at::Tensor& to, const at::Tensor& from);

/// Makes a sum an average, in place: integers towards zero, the parts of a complex number each by
/// itself.
void divide(const at::Tensor& sum, int ranks);

/// A call under way in one of our backends for CPU tensors. It holds what was called, on what
/// memory it is done, and what has become of it. It holds its tensors until it is released. Any
/// thread may wait.
class TensorWork : public c10d::Work, public shm::Call {
 public:
  TensorWork(int rank, Request request, std::shared_ptr<const GroupNames> names);

  bool isCompleted() override { return done_.load(std::memory_order_acquire); }
  bool isSuccess() const override { return done_ && !exception_; }
  std::exception_ptr exception() const override { return done_ ? exception_ : nullptr; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override {}
  std::vector<at::Tensor> result() override { return results(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  /// Equal on all ranks whose calls fit together. How much passes between two ranks of an
  /// all_to_all is for the backend to compare.
  uint64_t hash() const override;
  std::string encoded() const override;
  std::string text() const override;

  const Request& request() const { return request_; }
  const std::shared_ptr<const GroupNames>& names() const { return names_; }
  void set_sequence(uint64_t sequence) { sequence_ = sequence; }

  // Where the backend reads and writes: plain (is_plain), of `dtype` (the tensor's own without),
  // alive until the end, and the caller's memory itself where that fits.

  /// The values of `tensor`.
  at::Tensor given(const at::Tensor& tensor, at::ScalarType dtype = at::ScalarType::Undefined);
  Blocks given(const Tensors& tensors, at::ScalarType dtype = at::ScalarType::Undefined);
  /// What becomes the value of `tensor` at the end. `reads`: its values matter before, too.
  at::Tensor taken(const at::Tensor& tensor, bool reads,
                   at::ScalarType dtype = at::ScalarType::Undefined);
  Blocks taken(const Tensors& tensors);
  /// How much the call moves, roughly: the larger of what was given and taken.
  size_t bytes() const { return std::max(given_bytes_, taken_bytes_); }

  // How a CallQueue runs it. What these throw is how the call ends.

  /// In the caller's thread: true when the call has ended, false when `run_later` is to go on with
  /// it. It must end unless the request is asynchronous.
  virtual bool run_here() { return false; }
  /// In the queue's thread, also where `run_here` was not asked.
  virtual void run_later() {}

  /// Blocks until it has ended, and leaves what became of it to `wait`.
  void await_end();
  /// Ends it: with the first error, or none. Writes the results and runs the future's callbacks.
  void complete(std::exception_ptr error) {
    if (end(std::move(error))) run_callbacks();
  }
  /// The first half of it. True where `run_callbacks` must follow, before which nobody who waits
  /// goes on.
  bool end(std::exception_ptr error);
  void run_callbacks();

 protected:
  /// Once, before the results are written. May throw.
  virtual void finish_results() {}
  CallSignature signature() const;
  /// A new tensor that lives until the end.
  at::Tensor keep(at::Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

 private:
  const Tensors& results() const {
    return request_.outputs.empty() ? request_.inputs : request_.outputs;
  }
  void resolve(c10::ivalue::Future& future) const;
  /// Those who wait go on.
  void let_go();

  const Request request_;
  const std::shared_ptr<const GroupNames> names_;
  const CallOrigin::Words origin_ = CallOrigin::current();
  const uint64_t recorded_ = FlightRecorder::take();
  uint64_t sequence_ = 0;
  size_t given_bytes_ = 0;
  size_t taken_bytes_ = 0;
  Tensors kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  ///< At the end: to, from.
  bool ended_ = false;             ///< The outcome is known; `done_` when the future has it, too.
  std::atomic<bool> done_{false};  ///< From here on `exception_` stays as it is.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace lockstep::backends
