#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/pending_work.h"
#include "lockstep/comm/checks/rank_checks.h"

namespace lockstep {

/// Holds a send or receive back until the other side has made its call too and both agree on dtype
/// and size. Gloo ends the process when they do not agree. Gloo's sends wait for their receives
/// anyway, so nothing that worked blocks now. The first calls of each channel (sender, receiver,
/// tag) are compared. The n-th send of a channel belongs to its n-th receive.
///
/// Keys: a sender sets `s`, a receiver `r`, of (channel, n). Each reads and deletes the other's.
/// Receives from any rank make it harder, as no receive belongs to a channel before a send has
/// come:
/// - The receiver picks a channel whose next `s` is there and then sets `r` as for that channel.
/// - Before its first such receive of a tag the receiver claims every channel ("any" under the
///   channel's mode). A sender that has compared enough claims "free". The first claim holds: an
///   "any" channel goes on comparing.
/// - The receiver sets `release` for the tag when it has compared enough of them, or came too late
///   to claim all. Senders that wait for an `r` see that and go on without.
class P2PGate {
 public:
  /// Issues the call on the backend: a send to or receive from `peer`. -1: from any.
  using Issue = std::function<c10::intrusive_ptr<c10d::Work>(std::vector<at::Tensor>&, int peer)>;
  static constexpr int kAnyRank = -1;

  /// `checks` says how many calls of a channel are compared. It must outlive the gate.
  P2PGate(std::shared_ptr<CheckContext> context, RankChecks& checks)
      : context_(std::move(context)), checks_(checks) {}
  ~P2PGate();
  P2PGate(const P2PGate&) = delete;
  P2PGate& operator=(const P2PGate&) = delete;

  /// A work that stands for the call, or null when it is not to be held back: issue it then.
  c10::intrusive_ptr<c10d::Work> submit(Operation operation, std::vector<at::Tensor>& tensors,
                                        int peer, int tag, std::chrono::milliseconds timeout,
                                        const Issue& issue);
  /// Fails what is still held back and ends the thread. Idempotent.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  using Key = std::pair<int, int>;  ///< (peer, tag)
  struct Held {
    c10::intrusive_ptr<PendingWork> work;
    CallSummary call;
    CallSignature signature;
    std::vector<at::Tensor> tensors;
    Issue issue;
    int tag = 0;
    int64_t index = 0;            ///< Within its channel.
    std::string told_under = {};  ///< The key by which the other side learns of it. Empty: none.
    bool is_told() const { return !told_under.empty(); }
    Clock::time_point deadline;
    bool all_left = false;  ///< Its peers had left the group at the last look.
    std::chrono::milliseconds timeout{};
  };
  struct Channel {
    int64_t next = 0;
    bool claimed = false;  ///< A sender has claimed "free", in vain or not.
    bool free = false;     ///< No more comparisons, but of what is held and told.
    std::deque<Held> held;
  };
  struct Tag {
    bool any_used = false;
    bool released = false;
    int64_t any_count = 0;
    std::deque<Held> held;
  };

  bool within_limit(int64_t index) { return checks_.compares(static_cast<uint64_t>(index) + 1); }
  bool hold_send(int peer, int tag, Channel& channel);
  bool hold_recv(int tag, Channel& channel);
  bool hold_any(int tag);
  /// Inside a catch clause: the error of the call, which is the store's where that is lost.
  std::exception_ptr failure_of(const CallSummary& call) const;
  c10::intrusive_ptr<c10d::Work> hold_back(Operation operation,
                                           const std::vector<at::Tensor>& tensors, int peer,
                                           int tag, std::chrono::milliseconds timeout,
                                           const Issue& issue);
  Held make_held(Operation operation, const std::vector<at::Tensor>& tensors, int peer, int tag,
                 std::chrono::milliseconds timeout, const Issue& issue) const;
  std::string channel_key(int sender, int receiver, int tag) const;
  std::string release_key(int receiver, int tag) const;

  void run();
  bool anything_held() const;
  /// Before it is failed: the other side is not to begin what has no counterpart. `word` is what it
  /// finds in place of the call. False where the store is lost.
  bool take_back(const Held& held, const std::string& word) const;
  bool advance(bool look_for_ended);
  /// Whether the first that is held has been issued or has failed.
  bool advance_send(int peer, Channel& channel);
  bool advance_recv(int peer, Channel& channel);
  bool advance_any(Tag& tag);
  bool expire(Held& held, const std::vector<int>& peers, bool look_for_ended);
  /// How those have left of which none has a call of its own to come. Empty while one may come.
  /// `ended`: of them, those whose process has ended.
  std::string how_all_left(Held& held, const std::vector<int>& peers,
                           const std::vector<int>& ended) const;
  /// What the other side tells of its call. None before it calls, and where it leaves the group.
  std::optional<std::string> word_under(const std::string& key) const;
  /// Compares with `word`, which the other side set under `other_key`, then issues or fails.
  void settle(Held& held, int peer, const std::string& other_key, const std::string& word);
  void issue(Held& held, int peer);

  const std::shared_ptr<CheckContext> context_;
  RankChecks& checks_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Channel> sends_;
  std::map<Key, Channel> recvs_;
  std::map<int, Tag> tags_;
  std::string told_late_;  ///< What the others were told of the last call that timed out.
  Clock::time_point late_at_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace lockstep
