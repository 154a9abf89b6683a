#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/store.h"
#include "lockstep/rpc/future.h"

namespace lockstep::rpc::detail {

/// The other workers, and whether they are still there. Each worker has a call pending at each
/// other one, its liveness call, which is answered when that one leaves in order. A worker that
/// dies breaks the connection, and so the call fails at once. Any thread.
class Peers {
 public:
  /// `names`: of those that start together, by rank; none for a worker that joins them. `id`: this
  /// worker's number, which for those is the rank. `store`: for this object alone. `on_loss`: is
  /// told the number of a worker that is lost or has left, on any thread.
  using OnLoss = std::function<void(int id)>;
  Peers(Store store, std::vector<std::string> names, int id, OnLoss on_loss);

  /// Calls another worker, which is known to the transport.
  void watch(int id, const std::string& name);
  /// What a liveness call from another worker waits for.
  Future<void> liveness() const { return leaves_.future(); }
  /// Answers the liveness calls of the others: this worker leaves.
  void let_go() const { leaves_.set_value(); }

  /// The ranks' names, then those that joined and are here.
  std::vector<std::string> names() const;
  /// Those that died, or left without the others, and have not come again.
  std::vector<std::string> lost() const;
  /// Waits until all ranks that are not lost have come to the same point with the same `what`, each
  /// with a value. Returns the values by rank. Throws TimeoutError with the names of those that
  /// have not come. `phase`: "start" or "shutdown".
  std::map<int, std::string> meet(const std::string& what, const std::string& value,
                                  std::chrono::steady_clock::time_point deadline,
                                  const std::string& phase = "shutdown");
  /// Waits until those that joined have left, or are lost. Throws TimeoutError with their names.
  void wait_for_joined(std::chrono::steady_clock::time_point deadline) const;

 private:
  enum class State { here, left, lost };
  struct Peer {
    std::string name;
    State state = State::here;
  };
  struct Shared {
    std::mutex mutex;
    std::map<int, Peer> peers;  ///< By number: a later one of the same name is after the earlier.
    OnLoss on_loss;
  };
  bool expects(int rank) const;
  /// Those that came by `join` and have not left; a name twice where two had it.
  std::vector<std::string> joined_here() const;
  Store store_;
  const std::vector<std::string> names_;
  const int id_;
  const Promise<void> leaves_;
  const std::shared_ptr<Shared> shared_;  ///< Lifelines may end after this object.
};

}  // namespace lockstep::rpc::detail
