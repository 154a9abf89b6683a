#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/arrival.h"
#include "lockstep/base/failure.h"
#include "lockstep/comm/store.h"

namespace lockstep {

struct GroupContext;

/// Looks, while a group forms, whether members that are waited for were lost. A process that has
/// ended is seen on its own host, which tells the others through the store. One thread.
class FormingWatch {
 public:
  enum class Phase {
    meeting,    ///< The members are to say that they have come.
    connecting  ///< They have, and their backends connect.
  };
  FormingWatch(std::shared_ptr<GroupContext> context, std::string group,
               std::vector<int> global_ranks, Phase phase);

  /// Of the members that are waited for, by their numbers in the group, one that was lost. None:
  /// none. Asks the store.
  std::optional<Failure> lost(const std::vector<int>& missing);
  /// The same as a PeerLostError.
  void throw_if_lost(const std::vector<int>& missing);
  /// Where a later generation has begun. Asks no store. Any thread.
  void throw_if_cancelled() const;
  /// What throw_if_lost threw before, again: Gloo makes another error of it.
  void throw_if_found() const;
  /// All members but this rank.
  std::vector<int> others() const;
  /// Waits for keys of a store, of which `check` says whether some are there. False where they do
  /// not come within the group's time-out, or `timeout` if that is longer. Throws PeerLostError
  /// where one of the members `absent()`, who are to set them, was lost.
  bool await(Arrival& keys, const std::function<bool(const std::vector<std::string>&)>& check,
             const std::function<std::vector<int>()>& absent,
             std::chrono::milliseconds timeout = {});

 private:
  bool may_be_missed(int global_rank);

  const std::shared_ptr<GroupContext> context_;
  Store store_;
  const std::string group_;
  const std::vector<int> ranks_;  ///< In the default group.
  const Phase phase_;
  std::vector<std::string> identities_;  ///< Of the members; empty: not known yet.
  std::optional<Failure> found_;         ///< Who was lost.
};

/// The start of an error's message: "rank 0: forming the group '1' of 2 ranks failed".
std::string forming(const GroupContext& context, const std::string& group, size_t ranks);

/// What InitOptions::cancelled tells.
Failure cancelled_generation();

/// The prefix of the checks' keys of a group.
std::string check_part(const std::string& group);

/// A view of `store` in which `prefix` and "/" are put before every key. As long as `watch` lives a
/// wait for a key throws PeerLostError when another member was lost, and takes at least the group's
/// time-out.
c10::intrusive_ptr<c10d::Store> watched_store(const std::string& prefix,
                                              const c10::intrusive_ptr<c10d::Store>& store,
                                              const std::shared_ptr<FormingWatch>& watch);

}  // namespace lockstep
