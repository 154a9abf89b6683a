#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::rpc {

/// All workers of a bound give the same.
struct StalenessOptions {
  /// Those that take part from the start, by name. They are waited for before they have come.
  std::vector<std::string> workers = {};
  /// A worker may be so many steps ahead of the slowest one; 0: all go in step. None: no bound, as
  /// with HogWild.
  std::optional<int64_t> max_staleness = {};
  /// A wait fails when nobody makes a step for so long. None: the server's Options::timeout.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Tells several bounds on one server apart.
  std::string name = "steps";
};

/// Bounds by how many steps workers that train the same parameters may be apart: stale synchronous
/// parallel (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
/// Server", NIPS 2013). Each has a clock, which counts its steps. A worker that is more than
/// `max_staleness` ahead of the slowest one waits:
///
///     rpc::StalenessBound bound("server", {.workers = {"trainer_1", "trainer_2"},
///                                          .max_staleness = 4});
///     for (const auto& batch : batches) {
///       train(batch);
///       bound.step();
///     }
///     bound.finish();
///
/// The clocks lie with a worker, the server, which needs nothing but its agent. It may take part
/// itself. Clocks of workers that have died, have left or have finished do not count: nobody waits
/// for them. A worker that comes later, or comes again in a dead one's place, begins at the slowest
/// one's clock. When all have finished or are gone, the bound is over. Who comes then makes it
/// anew, and waits for all of `workers` that are there.
///
/// One thread at a time; not copied or moved. After an exception only its destructor is of use.
class StalenessBound {
 public:
  /// Blocks for one call. Throws RemoteError of a UsageError when `workers` is empty or names one
  /// that there has never been, when `max_staleness` is negative, and when another worker gave
  /// other options; else what a call throws.
  StalenessBound(std::string server, const StalenessOptions& options);
  /// This worker's clock counts no more. Does not wait for the server to hear of it.
  ~StalenessBound();
  StalenessBound(const StalenessBound&) = delete;
  StalenessBound& operator=(const StalenessBound&) = delete;

  /// This worker has made a step. Waits while that is too far ahead. Returns by how many steps it
  /// is ahead of the slowest one, at most `max_staleness`. Throws TimeoutError, which names those
  /// that it waits for, when nobody has made a step for the time-out, twice that at the latest;
  /// PeerLostError without the server.
  int64_t step();
  /// This worker has made its last step. Its clock counts no more. Waits until no other one's does:
  /// then the parameters are as they will stay. Throws as `step`.
  void finish();
  /// The clock: the steps made, and those of the slowest one when this worker came.
  int64_t clock() const { return clock_; }

 private:
  void wait_for_others(bool last);

  const std::string server_, name_;
  int64_t number_ = 0;  ///< Of this worker's part.
  int64_t clock_ = 0;
  int64_t slowest_ = 0;
  std::chrono::milliseconds timeout_{};
  bool finished_ = false;
};

namespace detail {
/// Registers the functions by which workers reach the clocks.
void register_staleness_functions();
}  // namespace detail

}  // namespace lockstep::rpc
