#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/checks/observed_call.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/store.h"
#include "lockstep/comm/work_state.h"

namespace lockstep {

/// The default group's name, as Python counts groups.
inline constexpr const char* kDefaultGroup = "0";

/// What all groups of one World share.
struct GroupContext {
  Store store;      ///< The prefix in which Python keeps its groups: "default_pg".
  Store own_store;  ///< Our own keys, which Python ranks neither read nor write.
  int rank = 0;     ///< In the default group.
  int world_size = 1;
  std::string backend;
  std::string interface;
  std::string address;  ///< This host's address that the other ranks reach.
  std::string host;     ///< BackendOptions::host.
  c10::Device device = c10::kCPU;
  std::chrono::milliseconds timeout{120'000};
  DebugLevel debug = DebugLevel::info;
  std::function<bool()> cancelled;  ///< See InitOptions.
  int next_group = 1;               ///< The name of the next one, counted as Python does.
  std::map<std::vector<int>, int> local_groups;  ///< By their ranks: how many only members made.

  std::mutex mutex;
  std::vector<std::weak_ptr<ProcessGroup::Impl>> groups;  ///< In the order they were made.
};

class ProcessGroup::Impl {
 public:
  Impl(std::shared_ptr<GroupContext> context, std::string name, std::vector<int> global_ranks,
       int rank, std::string backend);
  ~Impl();

  /// The backend with its checks. Throws CommError once the group is closed.
  c10d::Backend& backend() const;
  /// The same; null once the group is closed.
  const c10::intrusive_ptr<c10d::Backend>& handle() const { return backend_; }
  c10d::ProcessGroup& native() const;
  /// Of the backend that was made.
  const BackendTraits& traits() const { return traits_; }
  /// Where tensors of this group's own messages live.
  c10::Device device() const { return device_; }

  /// The operation's handle. `p2p`: it is a send or a receive.
  Work make_work(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> outputs,
                 std::vector<at::Tensor> kept_alive, bool p2p = false) const;

  /// Ends the group. `abort`: this rank has failed, wait for nothing that is in flight. Else it
  /// waits for what is, and up to 5 s for members that are not done with forming. Idempotent.
  void close(bool abort) noexcept;

  const std::shared_ptr<GroupContext> context;
  const std::string name;
  const std::vector<int> global_ranks;
  const int rank;
  const int size;
  const std::string backend_name;
  std::chrono::milliseconds timeout;
  int64_t barriers = 0;  ///< Monitored barriers so far.
  int64_t splits = 0;
  /// See ProcessGroup::note_steps.
  const std::shared_ptr<std::atomic<int64_t>> steps = std::make_shared<std::atomic<int64_t>>(0);

 private:
  void await_formed_by_all();

  c10::Device device_;
  BackendTraits traits_;
  std::shared_ptr<detail::WaiterPool> waiters_;
  c10::intrusive_ptr<c10d::ProcessGroup> native_;
  c10::intrusive_ptr<c10d::Backend> backend_;
};

/// The key in GroupContext::own_store under which rank `rank` of a group tells that it is one of
/// ours.
std::string member_key(const std::string& group, int rank);

/// The key of `own_store` by which a rank of the default group tells that it leaves.
std::string leave_key(int rank);

/// Every rank of the job calls it for a further group, with `ranks` in ascending order. Throws
/// MismatchError where another list or backend was given. Members wait for all ranks of the job,
/// and throw as `form_group`. Others wait for nobody.
void agree_on_group(const std::shared_ptr<GroupContext>& context, const std::string& name,
                    const std::vector<int>& ranks, const std::string& backend);

/// Forms a group of `global_ranks`, of which this process is one. All of them call it with the
/// same name. Blocks until all have come. Throws TimeoutError naming the missing ones, also those
/// whose whole host was lost, and PeerLostError naming one that has ended before it came.
std::shared_ptr<ProcessGroup::Impl> form_group(const std::shared_ptr<GroupContext>& context,
                                               const std::string& name,
                                               const std::vector<int>& global_ranks,
                                               const std::string& backend);

}  // namespace lockstep
