#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/mpi/mpi_engine.h"
#include "lockstep/comm/backends/tensor_work.h"

namespace lockstep::mpi {

/// One call of this rank: the MPI operations that it consists of and what has become of them. Holds
/// its tensors until all of them have ended, also after a time-out. Any thread may wait.
class MpiWork final : public backends::TensorWork {
 public:
  MpiWork(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, backends::Request request,
          std::shared_ptr<const backends::GroupNames> names)
      : TensorWork(group->rank, std::move(request), std::move(names)),
        engine_(std::move(engine)),
        group_(std::move(group)) {}

  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return source_; }

  // Before `Engine::submit`, by the caller:

  using TensorWork::keep;
  /// To be done when MPI is done, in this order, before the results are written.
  void afterwards(std::function<void()> step) { steps_.push_back(std::move(step)); }
  /// Starts non-blocking MPI operations, adds their requests and returns MPI's code. Called on the
  /// MPI thread, several in the order in which they were added. `call`: MPI's name of it.
  using Start = std::function<int(MPI_Comm, std::vector<MPI_Request>&)>;
  void add_several(const char* call, Start start) { starts_.emplace_back(call, std::move(start)); }
  /// The same of one operation: `start(communicator, MPI_Request*)`.
  template <class StartOne>
  void add(const char* call, StartOne start) {
    add_several(call, [start](MPI_Comm comm, std::vector<MPI_Request>& requests) {
      return start(comm, &requests.emplace_back(MPI_REQUEST_NULL));
    });
  }
  /// A receive: how many elements of `type` must come.
  void expect(int64_t elements, MPI_Datatype type) {
    expected_ = elements;
    expected_type_ = type;
  }

  // On the MPI thread:

  size_t operations() const { return starts_.size(); }
  /// Starts the next one. Gives its number of requests. Throws CommError; those that have started
  /// are then under way.
  size_t start_next();
  /// How many requests have ended since. Throws CommError or MismatchError when one has failed.
  size_t test();
  bool done() const { return next_ == starts_.size() && requests_.empty(); }
  /// After a failure: starts nothing more. True when none is under way any longer.
  bool drained();
  /// Asks for the end of what can be cancelled: receives.
  void cancel();

  Group& group() const { return *group_; }
  bool is_collective() const { return request().operation < Operation::send; }
  std::chrono::steady_clock::time_point deadline;  ///< Set by the engine.

 private:
  void finish_results() override {
    for (const auto& step : steps_) step();
  }
  void receive_status(const MPI_Status& status);
  [[noreturn]] void throw_failure(int code) const;

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Group> group_;
  std::vector<std::pair<const char*, Start>> starts_;
  size_t next_ = 0;                    ///< Of `starts_`.
  std::vector<MPI_Request> requests_;  ///< Under way.
  int64_t expected_ = -1;
  MPI_Datatype expected_type_ = MPI_DATATYPE_NULL;
  std::vector<std::function<void()>> steps_;
  std::atomic<int> source_{-1};
};

}  // namespace lockstep::mpi
