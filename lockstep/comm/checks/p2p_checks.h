#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/checks/rank_checks.h"

namespace lockstep {

/// Compares the first sends and receives of each channel (sender, receiver, tag), the n-th with the
/// n-th. Where two differ both works throw. Gloo would end the process or give wrong data.
///
/// The side that comes second compares before it makes its call, and tells the first one by the
/// message's key in the store. No call blocks or is put off. One that differs is answered by a
/// tensor that fits it: so later messages keep their order.
///
/// Receives from any rank are not compared: no message is theirs before it has come. From the first
/// one on, its rank compares no receive of this tag, and says so under a key of the tag.
class P2PChecks {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Issue = std::function<WorkPtr(std::vector<at::Tensor>&)>;

  /// `checks` says how many calls of a channel are compared. It must outlive this.
  P2PChecks(std::shared_ptr<CheckContext> context, RankChecks& checks)
      : context_(std::move(context)), checks_(checks) {}
  /// Makes the call of one tensor by `issue`: a send to `call.root`, or a receive from it or any.
  WorkPtr run(CallSignature call, std::vector<at::Tensor>& tensors, int tag, const Issue& issue);

 private:
  const std::shared_ptr<CheckContext> context_;
  RankChecks& checks_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, uint64_t> sends_, receives_;  ///< Of (peer, tag), so far.
  std::set<int> any_tags_;  ///< Of which this rank has received from any.
  std::vector<std::pair<at::Tensor, WorkPtr>> answers_;  ///< To calls that differ, until they end.
};

}  // namespace lockstep
