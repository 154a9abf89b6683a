#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/failure.h"
#include "lockstep/comm/checks/call_signature.h"

namespace c10d {
class Store;
}

namespace lockstep {

/// What the checks, the works and the failure reports of one group share. Outlives the backend
/// where a future still needs it, and holds no thread and no backend. Any thread may call.
class CheckContext {
 public:
  /// For a plain TCP store it makes a connection of its own: see `limited_store`.
  CheckContext(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, RankNames names,
               std::string group, std::chrono::milliseconds timeout);
  ~CheckContext();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& group() const { return group_; }
  const RankNames& names() const { return names_; }
  /// "rank 3": this rank's number in the default group.
  std::string me() const { return rank_list({rank_}, names_); }

  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_ = timeout.count(); }

  /// The store of this group's keys, under a prefix of their own. Each request ends within the
  /// time-out and throws the store's error.
  c10d::Store& store() { return *store_; }

  /// A number that `add` keeps, 0 when unset. One round trip over TCP. A file is only read, as
  /// adding 0 there would write a record at every look.
  int64_t read_number(const std::string& key);

  /// Whether all ranks have announced themselves (see announce_checks). Asks the store.
  bool all_announced();
  /// Tells the other ranks in what this one failed, and why as far as it knows. Never throws.
  void tell_failed(const std::string& text) noexcept;
  /// What this rank told last, also when the store was lost. Empty when it told nothing. Never
  /// blocks.
  std::string told() const;
  /// What another rank told so. None when it told nothing. Asks the store.
  std::optional<std::string> word_of(int rank);

  /// Tells the other ranks how this one leaves the group: `closed` in order, or `gave_up`, with
  /// what it failed in. Who closes it after `steps` of its loop, and has not failed, has `left`.
  /// Only the first call counts. Messages whose other side has not come fail from now on. Never
  /// throws.
  void tell_end(Failure::Kind kind, int64_t steps = 0) noexcept;
  bool has_told_end() const { return has_told_end_; }
  /// What a rank told so, whose process may live on. None when it told nothing so, or where the
  /// store is lost. Asks the store until it is known.
  std::optional<Failure> told_end(int rank);
  bool has_left_its_loop(int rank);
  /// The ranks whose process has ended though they had not closed the group, as far as is known
  /// where the store is lost. See `ended`.
  std::vector<int> died();
  /// A wait has ended though the backend's work has not.
  void abandon_work() { has_abandoned_work_ = true; }
  bool has_abandoned_work() const { return has_abandoned_work_; }

  /// Why the group is of no more use, as seen by other means than the store.
  using FailureCallback = std::function<std::optional<Failure>()>;
  /// What the waits of this group call every 50 ms. It must not block. Once this returns, the one
  /// before is called no more. Empty: none is called.
  void set_failure_callback(FailureCallback callback);
  /// What the failure callback finds.
  std::optional<Failure> seen_failure() const;

  /// Reads the other ranks' announcements if all are there: a rank whose end takes the store with
  /// it can then still be named. Asks the store.
  void remember_identities();
  /// Of `ranks`, those whose process has ended, as far as it can be seen from this host. Asks the
  /// store for identities that it does not know yet. Never throws.
  std::vector<int> ended(const std::vector<int>& ranks);
  /// The other ranks whose process has ended, or that have told how they leave the group. Asks the
  /// store.
  std::vector<int> gone();
  std::vector<int> others() const;
  /// The error of `what` ("send(to rank 1) in group '0'"), which found the store lost. With it is
  /// named the failure that the failure callback finds, or else the ranks of this host that have
  /// ended. Told as `tell_failed` unless this rank has told something before. Call it in the
  /// handler of the store's error. It asks no store. The first call waits up to 200 ms for the end
  /// of the job's rank 0, which may hold the store.
  std::exception_ptr store_lost(const std::string& what);
  /// That these ranks have ended or left the group. Where one told before in what it failed, that
  /// is added: the first cause may be another rank. Ranks that left after their loops are told
  /// where all others among these have told that they failed. Else those others are. Asks the
  /// store. Never throws.
  Failure end_of(const std::vector<int>& ranks);
  /// The numbers of this rank and the other side of a message.
  std::vector<int> ranks_of_message(int peer) const {
    return {names_[static_cast<size_t>(rank_)], names_[static_cast<size_t>(peer)]};
  }
  /// A rank of the group, to which this has happened.
  Failure::Rank member(int group_rank, Failure::Kind kind) const;
  Failure failure_of(int group_rank, Failure::Kind kind) const;

 private:
  void tell(const std::string& key, const std::string& word, bool is_end = false) noexcept;
  std::optional<Failure> known_end(int rank);
  std::string identity_of(int rank);
  std::string known_identity(int rank) const;
  std::optional<Failure> why_store_is_lost();
  /// The job's rank 0, which may hold the store.
  bool is_first(int rank) const { return names_[static_cast<size_t>(rank)] == 0; }

  const bool over_tcp_;
  std::atomic<bool> has_abandoned_work_{false};
  const int rank_;
  const int size_;
  const RankNames names_;
  const std::string group_;
  std::atomic<int64_t> timeout_ms_;

  const c10::intrusive_ptr<c10d::Store> store_;

  std::atomic<bool> has_told_end_{false};
  std::atomic<bool> has_looked_for_holder_{false};  ///< Of the store, once it was lost.

  mutable std::mutex mutex_;  ///< Never held while anything is waited for; guards the next four.
  std::string told_;
  std::vector<std::string> identities_;       ///< Empty text: not known.
  std::vector<std::optional<Failure>> ends_;  ///< How ranks are known to have left the group.

  mutable std::mutex checking_;  ///< Held while the failure callback is asked.
  FailureCallback failure_callback_;
};

/// The key under which a rank announces itself.
std::string announcement_key(int rank);
/// The prefix of all keys of the checks of a group.
std::string check_prefix(const std::string& group);

}  // namespace lockstep
