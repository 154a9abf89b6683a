#pragma once

#include <torch/csrc/distributed/rpc/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch::distributed::rpc {
class Message;
}

namespace lockstep::rpc::detail {

/// A reference that a message brings to its receiver.
struct CarriedReference {
  using Id = torch::distributed::rpc::GloballyUniqueId;
  int64_t owner = 0;
  Id reference, fork;
};

/// Those in a message that this process has made. Reads the pickle that LibTorch has written.
std::vector<CarriedReference> references_in(const torch::distributed::rpc::Message& message);

/// Which worker has which references to what is here, and which autograd contexts are its own.
/// LibTorch counts references, and so would keep for ever what a dead worker referred to. Any
/// thread.
class ReferenceHolders {
 public:
  using Id = torch::distributed::rpc::GloballyUniqueId;

  explicit ReferenceHolders(int self) : self_(self) {}

  /// The worker has the fork of what is here, or is being sent it.
  void add(int worker, const Id& reference, const Id& fork);
  /// The worker is sent these, of which those of others do not count.
  void add(int worker, const std::vector<CarriedReference>& carried);
  /// A message with these was not sent.
  void take_back(const std::vector<CarriedReference>& carried);
  void remove(const Id& fork);
  /// A context came here that some worker has made; its number says which.
  void add_context(int64_t context);
  void remove_context(int64_t context);

  /// The worker is gone: frees what it held here.
  void release(int worker);

 private:
  struct Held {
    int worker = 0;
    Id reference;
  };

  const int self_;
  std::mutex mutex_;
  std::unordered_map<Id, Held, Id::Hash> forks_;
  std::map<int, std::unordered_set<int64_t>> contexts_;  ///< By the worker that made them.
  std::set<int> gone_;
};

}  // namespace lockstep::rpc::detail
