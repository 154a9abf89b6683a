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
class TCPStore;
}  // namespace c10d

namespace lockstep {

/// What the checks, the works and the failure reports of one group share. Outlives the backend
/// where a future still needs it, and holds no thread and no backend. Any thread may call.
class CheckContext {
 public:
  CheckContext(c10::intrusive_ptr<c10d::Store> store, int rank, int size, RankNames names,
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

  /// The store of this group's keys, under a prefix of their own. Over TCP it is a new connection:
  /// another thread's blocking wait on the shared one does not hold up the checks. Made at the
  /// first call, within some seconds, unless `connect` was called. Throws the store's error when
  /// that fails, and at once ever after.
  c10d::Store& store();
  /// Makes that connection, for which it takes up to the time-out: while the group forms, the store
  /// is surely there. Remembers the identities of the other ranks if all have told them. Throws as
  /// `store` does.
  void connect();

  /// A number that `add` keeps, 0 when unset. One round trip over TCP. A file is only read, as
  /// adding 0 there would write a record at every look.
  int64_t read_number(const std::string& key);

  /// Whether all ranks have announced themselves (see announce_checks). Asks the store.
  bool all_announced();
  /// Tells the other ranks in what this one failed, and, when it is `known`, why. Never throws, and
  /// waits for no connection: without one nobody is told.
  void tell_failed(const std::string& text, bool known) noexcept;
  /// What this rank told last, also when the store was lost. Empty when it told nothing. Never
  /// blocks.
  std::string told() const;
  /// What another rank told so. None when it told nothing. Asks the store.
  struct Word {
    std::string text;
    bool known = false;
  };
  std::optional<Word> word_of(int rank);

  /// Tells the other ranks that this one leaves the group after `steps` of its loop, unless it has
  /// failed before. As `tell_failed`. Without steps there is nothing to tell.
  void tell_left(int64_t steps) noexcept;
  /// What another rank told so. None when it told nothing. Asks the store.
  std::optional<int64_t> steps_when_left(int rank);

  /// Tells the other ranks that this one has closed the group in order. As `tell_failed`.
  void tell_closed() noexcept;
  /// Likewise that it has given the group up, and in what it failed if it has told that.
  void tell_given_up() noexcept;
  /// How a rank whose process may live on has left the group. None when it told nothing so, or
  /// where the store is lost. Asks the store.
  std::optional<Failure> how_it_left(int rank);
  /// The ranks whose process has ended though they had not closed the group, as far as is known
  /// where the store is lost. See `ended`.
  std::vector<int> died();
  /// A wait has ended though the backend's work has not.
  void leave_work_behind() { work_left_behind_ = true; }
  bool has_left_work_behind() const { return work_left_behind_; }

  /// Tells the other hosts of a rank of this host that has ended or left. Its `calls`: it makes no
  /// more collectives of the group than these. As `tell_failed`.
  void tell_gone(int rank, const Failure& gone) noexcept;
  /// Whether any was told of. Asks the store.
  bool any_gone() { return read_number("gone") > 0; }
  /// What was told of the rank, if anything. Asks the store.
  std::optional<Failure> gone(int rank);
  /// Each host's ranks are told of so. `ended` then looks for those whose process has.
  void expect_to_be_told() { expects_gone_ = true; }

  /// Why the group is of no more use, as seen by other means than the store.
  using FailureCheck = std::function<std::optional<Failure>()>;
  /// What the waits of this group ask, every 50 ms. It must not block. Once this returns, the check
  /// before is asked no more. Empty: none is asked.
  void set_failure_check(FailureCheck check);
  /// What the failure check finds.
  std::optional<Failure> seen_failure() const;

  /// The ranks that have not. Asks the store.
  std::vector<int> unannounced();
  /// Reads the other ranks' announcements, which must be there: a rank whose end takes the store
  /// with it can then still be named.
  void remember_identities();
  /// Of `ranks`, those whose process has ended, as far as it can be seen from this host or was told
  /// by theirs. Asks the store for identities that it does not know yet. Never throws.
  std::vector<int> ended(const std::vector<int>& ranks);
  std::vector<int> others() const;
  /// The error of `what` ("send(to rank 1) in group '0'"), which found the store lost. With it is
  /// named the failure that the failure check finds, or else the ranks of this host that have
  /// ended. Told as `tell_failed` unless this rank has told a cause before. Call it in the handler
  /// of the store's error. It asks no store. The first call waits up to 200 ms for the end of the
  /// job's rank 0, which may hold the store.
  std::exception_ptr store_lost(const std::string& what);
  /// "rank 1 (process 4711)".
  std::string name_with_process(int group_rank);
  /// That these ranks have ended. Where one told before in what it failed, that is added: the first
  /// cause may be another rank. Ranks that left after their loops count only where no other is
  /// among these. Asks the store. Never throws.
  Failure end_of(const std::vector<int>& ranks);
  /// A rank of the group, to which this has happened.
  Failure::Rank member(int group_rank, Failure::Kind kind) const;
  Failure failure_of(int group_rank, Failure::Kind kind) const;

 private:
  c10d::Store& connected(std::chrono::milliseconds patience);
  std::string identity_of(int rank);
  std::string known_identity(int rank) const;
  std::optional<Failure> why_store_is_lost();
  /// The job's rank 0, which may hold the store.
  bool is_first(int rank) const { return names_[static_cast<size_t>(rank)] == 0; }

  const c10::intrusive_ptr<c10d::Store> shared_store_;
  const bool over_tcp_;
  std::atomic<bool> expects_gone_{false};
  std::atomic<bool> work_left_behind_{false};
  const int rank_;
  const int size_;
  const RankNames names_;
  const std::string group_;
  std::atomic<int64_t> timeout_ms_;

  std::mutex connecting_;  ///< Held while a connection is made; guards the next two.
  c10::intrusive_ptr<c10d::Store> store_;
  std::exception_ptr lost_;                       ///< Why there is no connection and will be none.
  std::atomic<c10d::Store*> connected_{nullptr};  ///< Of `store_`, once it is there.

  std::atomic<bool> has_looked_for_holder_{false};  ///< Of the store, once it was lost.

  mutable std::mutex mutex_;  ///< Never held while anything is waited for; guards the next four.
  std::string told_;
  bool told_cause_ = false;
  std::vector<std::string> identities_;  ///< Empty text: not known.
  std::vector<bool> closed_;             ///< Which ranks are known to have closed the group.

  mutable std::mutex checking_;  ///< Held while the failure check is asked.
  FailureCheck failure_check_;
};

/// For a call in a fork of `rank` ("rank 3"), which made the group.
[[noreturn]] void throw_in_fork(const std::string& rank, const std::string& group);

/// The TCP store of which this is one, or a prefix. Null for another kind. Lives as long as it.
const c10d::TCPStore* tcp_store_of(const c10::intrusive_ptr<c10d::Store>& store);

/// The key under which a rank announces itself.
std::string announcement_key(int rank);
/// The prefix of all keys of the checks of a group.
std::string check_prefix(const std::string& group);

}  // namespace lockstep
