#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/call_signature.h"

namespace c10d {
class Store;
}

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

  /// Keys of this group under a prefix of their own. A connection of its own over TCP, made at the
  /// first call: another thread's blocking wait on the shared one does not hold up the checks.
  c10d::Store& store();

  /// A number that `add` keeps, 0 when unset. One round trip over TCP; a file is only read, where
  /// adding 0 would write a record at every look.
  int64_t read_number(const std::string& key);

  /// Whether all ranks have announced themselves (see announce_checks); asks the store.
  bool all_announced();
  /// Tells the other ranks in what this one failed, and, when it is `known`, why; never throws.
  void tell_failed(const std::string& text, bool known) noexcept;
  /// What this rank told last, also when the store was lost; empty when it told nothing.
  std::string told() const;
  /// What another rank told so; none when it told nothing. Asks the store.
  struct Word {
    std::string text;
    bool known = false;
  };
  std::optional<Word> word_of(int rank);

  /// The ranks that have not; asks the store.
  std::vector<int> unannounced();
  /// Reads the other ranks' announcements, which must be there: a rank whose end takes the store
  /// with it can then still be named.
  void remember_identities();
  /// Of `ranks`, those whose process has ended, as far as it can be seen from this host. Asks the
  /// store for identities that it does not know yet; never throws.
  std::vector<int> ended(const std::vector<int>& ranks);
  std::vector<int> others() const;
  /// "rank 1 (process 4711)".
  std::string name_with_process(int group_rank);
  /// "rank 1 (process 4711) has ended", and in what it failed where it told that before: the first
  /// cause may be another rank. Asks the store; never throws.
  std::string how_they_ended(const std::vector<int>& ranks);

 private:
  std::string identity_of(int rank);

  const c10::intrusive_ptr<c10d::Store> shared_store_;
  const bool over_tcp_;
  const int rank_;
  const int size_;
  const RankNames names_;
  const std::string group_;
  std::atomic<int64_t> timeout_ms_;
  mutable std::mutex mutex_;
  std::string told_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<std::string> identities_;  ///< Empty text: not known.
};

/// The key under which a rank announces itself.
std::string announcement_key(int rank);
/// The prefix of all keys of the checks of a group.
std::string check_prefix(const std::string& group);

}  // namespace lockstep
