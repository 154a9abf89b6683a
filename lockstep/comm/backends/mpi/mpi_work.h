#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/mpi/mpi_engine.h"
#include "lockstep/comm/checks/call_signature.h"

namespace lockstep::mpi {

/// One call of this rank: the MPI operations that it consists of and what has become of them. Holds
/// its tensors until all of them have ended, also after a time-out. Any thread may wait.
class MpiWork : public c10d::Work {
 public:
  struct Description {
    Operation operation = Operation::barrier;
    std::vector<at::Tensor> results = {};  ///< What `result` and the future give.
    std::chrono::milliseconds timeout{};
    uint64_t sequence = 0;
  };
  MpiWork(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, Description description);
  ~MpiWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override {}
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return description_.results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return description_.sequence; }

  // Before `Engine::submit`, by the caller:

  /// A contiguous tensor of `dtype` with the same values, to send from: itself if it can be.
  at::Tensor given(const at::Tensor& tensor, at::ScalarType dtype);
  /// A contiguous tensor of `dtype` whose values `tensor` gets at the end: itself if it can be.
  /// `reads`: its values matter before, too.
  at::Tensor taken(const at::Tensor& tensor, at::ScalarType dtype, bool reads);
  /// A new tensor that lives until the end.
  at::Tensor fresh(at::IntArrayRef shape, const at::TensorOptions& options);
  /// To be done when MPI is done, in this order; the copies of `taken` come last.
  void afterwards(std::function<void()> step) { steps_.push_back(std::move(step)); }
  /// Keeps `to` for the end, when it gets `from`'s values.
  void copy_at_end(at::Tensor to, at::Tensor from) {
    copies_.emplace_back(std::move(to), std::move(from));
  }
  /// Starts one non-blocking MPI operation and returns MPI's code. Called on the MPI thread;
  /// several in the order in which they were added. `call`: MPI's name of it.
  using Start = std::function<int(MPI_Comm, MPI_Request*)>;
  void add(const char* call, Start start);
  /// A receive: how many elements of `type` must come.
  void expect(int64_t elements, MPI_Datatype type) {
    expected_ = elements;
    expected_type_ = type;
  }
  void free_at_end(MPI_Datatype type) { types_.push_back(type); }

  // On the MPI thread:

  /// Starts operations, as far as they may be under way. Throws CommError; those before the failing
  /// one are then under way.
  void start();
  bool all_started() const { return next_ == starts_.size(); }
  enum class Progress { none, some, done };
  /// Looks which have ended, and starts further ones. Throws CommError or MismatchError when one
  /// has failed.
  Progress test();
  /// After a failure: starts nothing more. True when none is under way any longer.
  bool drained();
  /// Asks for the end of what can be cancelled: receives.
  void cancel();
  /// Frees what MPI has given it, when nothing is under way any more.
  void release() noexcept;
  /// Ends it, with an error or none: copies results, runs the future's callbacks.
  void complete(std::exception_ptr error);

  Group& group() const { return *group_; }
  /// "all_reduce, collective 3 of group '0',"
  std::string text() const;
  std::chrono::milliseconds timeout() const { return description_.timeout; }
  bool is_collective() const { return description_.operation < Operation::send; }
  bool completed() const { return done_.load(std::memory_order_acquire); }
  size_t bytes = 0;                                ///< How much it moves, roughly.
  std::chrono::steady_clock::time_point deadline;  ///< Set by the engine.

 private:
  void receive_status(const MPI_Status& status);
  void resolve(c10::ivalue::Future& future) const;
  [[noreturn]] void throw_failure(int code) const;

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Group> group_;
  const Description description_;
  std::vector<std::pair<const char*, Start>> starts_;
  size_t next_ = 0;                   ///< Of `starts_`.
  std::deque<MPI_Request> requests_;  ///< Under way, in the order of their start.
  std::vector<MPI_Datatype> types_;
  int64_t expected_ = -1;
  MPI_Datatype expected_type_ = MPI_DATATYPE_NULL;
  std::vector<at::Tensor> kept_;
  std::vector<std::function<void()>> steps_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  ///< At the end: to, from.
  std::atomic<int> source_{-1};
  std::atomic<bool> done_{false};
  bool ended_ = false;  ///< The outcome is known; `completed_` when the future has it, too.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace lockstep::mpi
