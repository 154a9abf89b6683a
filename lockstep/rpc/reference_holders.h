#pragma once

#include <torch/csrc/distributed/rpc/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "lockstep/rpc/pickle_check.h"

namespace lockstep::rpc::detail {

/// Which worker has which references to what is here, and which autograd contexts are its own.
/// LibTorch counts references, and so would keep for ever what a dead worker referred to. Any
/// thread.
class ReferenceHolders {
 public:
  using Id = torch::distributed::rpc::GloballyUniqueId;

  explicit ReferenceHolders(int self) : self_(self), known_{self} {}

  /// There is, or was, a worker of this number.
  void know(int worker);
  /// Throws DataError for one of which this worker has never heard: nobody would ever give up what
  /// it refers to, and a graceful shutdown would wait for it.
  void check_known(const std::vector<CarriedReference>& carried) const;
  /// The same for a fork. A fork of two references is refused, too.
  void check_fork(const Id& reference, const Id& fork) const;

  /// The worker has the fork, or is being sent it. `owned`: of what is here.
  void add(int worker, const Id& reference, const Id& fork, bool owned = true);
  void add(int worker, const std::vector<CarriedReference>& carried);
  /// A message with these was not sent.
  void take_back(const std::vector<CarriedReference>& carried);
  /// The worker says that it has what it was sent. From now on it is its owner's.
  void accepted(const Id& fork);
  void remove(const Id& reference, const Id& fork);
  /// A context came here that some worker has made; its number says which.
  void add_context(int64_t context);
  void remove_context(int64_t context);

  /// The worker is gone: frees what it held here.
  void release(int worker);
  /// References of others that are known here.
  int64_t count() const;

 private:
  struct Held {
    int worker = 0;
    Id reference;
    bool owned = true;
  };
  void check_known(int64_t worker) const;

  const int self_;
  mutable std::mutex mutex_;
  std::unordered_map<Id, Held, Id::Hash> forks_;
  std::map<int, std::unordered_set<int64_t>> contexts_;  ///< By the worker that made them.
  std::set<int> known_, gone_;
};

}  // namespace lockstep::rpc::detail
