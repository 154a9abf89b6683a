#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/backends/hierarchical/host_layout.h"
#include "lockstep/comm/backends/hierarchical/host_links.h"
#include "lockstep/comm/backends/hierarchical/leaders.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/shared_memory/plans.h"
#include "lockstep/comm/shared_memory/reduction_kernels.h"
#include "lockstep/comm/shared_memory/shared_group.h"

namespace lockstep::hierarchical {

/// How long a rank that lost another host looks for the cause, which that host may tell.
inline constexpr std::chrono::milliseconds kLostPatience{1'000};

/// Of the group of all ranks over Gloo.
c10::intrusive_ptr<c10d::Store> flat_store(const BackendOptions& options);

/// Tells this rank's host key (host_key.h), and its process to the flat group's checks. Gives all
/// ranks' keys. Blocks until all have come. Throws the store's errors.
std::vector<std::string> meet(const BackendOptions& options);

/// How values become one. The ranks of a host are joined in shm's fixed tree, then the hosts in the
/// same tree over them. The bits depend only on which ranks share a host.
struct Joining {
  shm::ReduceKernel kernel = nullptr;  ///< For an average that of the sum.
  /// For an average: divides by the number of ranks, in place; once, at the end.
  std::function<void(std::byte* data, size_t bytes)> divide = {};

  /// `sources` in the kernel's order, which may hold `target`.
  void join(const std::vector<const std::byte*>& sources, std::byte* target, size_t bytes) const;
  void finish(std::byte* data, size_t bytes) const {
    if (divide) divide(data, bytes);
  }
};

/// A call's small data, which travels with the comparison of the calls: nothing else is sent for
/// it. All ranks' become one, in place. By default there is none.
struct SmallData {
  static constexpr size_t kMost = 1008;
  std::byte* data = nullptr;
  size_t bytes = 0;  ///< The same on all ranks whose calls are the same.
  Joining joining = {};
};

/// One rank's end of a group on several hosts: the shared memory of its host, and, on a leader, the
/// connections to the others. It runs calls, one at a time, from one thread at a time:
///
/// 1. In the first step on its host each rank gives a hash of its call. The leaders exchange what
///    they found in frames of one size, so that ranks whose calls differ cannot confuse the
///    transport. They tell their ranks in a later step. When calls differ, all ranks of all hosts
///    tell each other through the store what they called, and throw the same MismatchError. The
///    group goes on.
/// 2. A failure on a host is noticed there (see SharedGroup) and stands on its failure board. The
///    leader looks at the board, and at the processes of its ranks, five times a second on a thread
///    of its own. It tells the other hosts by the HostLinks, and these write it on their boards. So
///    do those to whom a leader's connection breaks. All ranks throw the cause, at present and
///    later calls. `checks` learn of it from the board, for the waits of the group that is not
///    ours.
/// 3. A rank that has left the group makes no more calls than it has made. The leader tells that
///    likewise, and a leader that waits in a later call fails.
class Hierarchy {
 public:
  /// Forms the groups: blocks until all have come. `checks`: of the flat group, which get a failure
  /// check. Throws PeerLostError when a host was lost meanwhile.
  Hierarchy(const BackendOptions& options, HostLayout layout, std::shared_ptr<CheckContext> checks);
  ~Hierarchy();
  /// Before the first call: the group of all ranks over Gloo, by which the leaders exchange data.
  void exchange_over(c10::intrusive_ptr<c10d::Backend> flat);

  const HostLayout& layout() const { return layout_; }
  shm::SharedGroup& local() { return group_; }

  /// Runs `body`, which makes the calls below. Throws MismatchError, and PeerLostError or
  /// TimeoutError in the words of `call`, after which the group is of no more use on any host.
  void run(const shm::Call& call, std::chrono::milliseconds timeout,
           const std::function<void()>& body);

  /// First of all, once: compares the calls of this host's ranks and begins to compare the hosts'.
  /// `conclude` must follow, with the same data. Where that is none, what lies between may use the
  /// host's memory. When it returns false, nothing may: this host's calls differ already.
  bool begin(const SmallData& data = {});
  /// Throws MismatchError when the calls differ anywhere.
  void conclude(const SmallData& data = {});
  void exchange(const SmallData& data) {
    begin(data);
    conclude(data);
  }

  /// For what a hash cannot say, after the comparison: all ranks must come to it.
  [[noreturn]] void differ();

  /// A collective of this host's ranks.
  void run_local(shm::Plan plan);
  /// One of them, for which the ranks must agree on all sizes.
  shm::Plan all_to_all_plan(shm::Buffers sends, shm::Buffers receives) {
    return shm::all_to_all_plan(group_, *call_, std::move(sends), std::move(receives), timeout_);
  }

  /// Memory for the present call, uninitialised. The next call gets the same memory again, as fresh
  /// memory costs more than what is done with it. A call asks once.
  std::byte* scratch(size_t bytes);

  // On a leader. Throw HostFailure, for `run` to handle.
  void send(int host, const std::byte* data, size_t bytes, Transfers& transfers) {
    leaders_->send(host, data, bytes, transfers);
  }
  void receive(int host, std::byte* data, size_t bytes, Transfers& transfers) {
    leaders_->receive(host, data, bytes, transfers);
  }
  void finish(Transfers& transfers) { leaders_->finish(transfers, timeout_); }

  /// Why the group is of no more use, as this host knows by now. Any thread.
  std::optional<Failure> failure() const { return group_.failure(); }
  /// The same, for which it waits.
  std::optional<Failure> await_failure(std::chrono::milliseconds patience) const;
  /// Gives the group up for all ranks, after what this rank failed in if it did. Any thread.
  void abort(const std::string& failed_in = {}) noexcept;
  /// Tells the others that this rank calls nothing any more.
  void leave() noexcept;

 private:
  struct Frame;
  void step(const std::function<void(std::byte*)>& give);
  void await_frames(const SmallData& data);
  [[noreturn]] void fail(const HostFailure& failure);
  Failure cause_of(const HostFailure& failure);
  /// The leader of a host, to which this has happened, for the ranks of its host.
  Failure::Rank leader_of(int host, Failure::Kind kind) const;
  std::unique_ptr<HostLinks> make_links(const BackendOptions& options) const;
  /// Writes it on the board of this host, whose ranks then throw it.
  void hear(const Failure& failure) noexcept;
  void look_around();
  void tell_failure() noexcept;
  Failure how_lost(int host, const std::string& why) const;

  const HostLayout layout_;
  const std::shared_ptr<const std::atomic<int64_t>> steps_;  ///< BackendOptions::steps.
  const std::shared_ptr<CheckContext> checks_;
  const std::function<void(const std::vector<int>&)> look_;  ///< BackendOptions::look.
  /// Null on a rank that does not lead. Made before what may wait for a host that is lost
  /// meanwhile.
  std::unique_ptr<HostLinks> links_;
  shm::SharedGroup group_;
  std::atomic<bool> told_failure_{false};
  std::atomic<int64_t> call_number_{0};  ///< Of the present call; 0: none.
  // The thread of the links only.
  std::vector<bool> told_left_;          ///< By rank of this host.
  std::vector<Failure> left_elsewhere_;  ///< Ranks of other hosts.
  std::unique_ptr<Leaders> leaders_;     ///< Null on a rank that does not lead.

  std::unique_ptr<std::byte[]> scratch_;
  size_t scratch_bytes_ = 0;

  // Of the present call.
  const shm::Call* call_ = nullptr;
  std::chrono::milliseconds timeout_{};
  bool alike_ = true;  ///< The calls of this host.
  bool first_step_ = true;
  int64_t differences_ = 0;    ///< Calls that differed so far.
  std::vector<Frame> frames_;  ///< By host, on a leader.
  Transfers frames_under_way_;
};

}  // namespace lockstep::hierarchical
