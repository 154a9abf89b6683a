#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/store.h"
#include "lockstep/rpc/future.h"

namespace lockstep::rpc::detail {

/// The other workers, and whether they are still there. Each worker has a call pending at each
/// other one, its lifeline, which is answered when that one leaves in order. A worker that dies
/// breaks the connection, and so the call fails at once. Any thread.
class Peers {
 public:
  /// `names`: by rank. `store`: for this object alone.
  Peers(Store store, std::vector<std::string> names, int rank);

  /// Calls all others.
  void watch();
  /// What a lifeline from another worker waits for.
  Future<void> lifeline() const { return leaves_.future(); }
  /// Answers the lifelines of the others: this worker leaves.
  void let_go() const { leaves_.set_value(); }

  /// Those that died, or left without the others.
  std::vector<std::string> lost() const;
  /// Waits until all that are not lost have come to the same point with the same `what`, each with
  /// a value. Returns the values by rank. Throws TimeoutError with the names of those that have not
  /// come.
  std::map<int, std::string> meet(const std::string& what, const std::string& value,
                                  std::chrono::steady_clock::time_point deadline);

 private:
  enum class State { here, left, lost };
  struct Shared {
    std::mutex mutex;
    std::vector<State> states;
  };
  bool expects(int rank) const;
  [[noreturn]] void throw_missing(const std::map<int, std::string>& came) const;

  Store store_;
  const std::vector<std::string> names_;
  const int rank_;
  const Promise<void> leaves_;
  const std::shared_ptr<Shared> shared_;  ///< Lifelines may end after this object.
};

/// Registers the function that lifelines call.
void register_lifeline();

}  // namespace lockstep::rpc::detail
