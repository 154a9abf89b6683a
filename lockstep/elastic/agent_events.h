#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/elastic/job_record.h"
#include "lockstep/elastic/registry.h"
#include "lockstep/launch/host_agent.h"

namespace lockstep::elastic {

struct AgentOptions {
  std::string id;         ///< Of this process, and of no other that ever uses the run id.
  std::string host = {};  ///< Name, for messages.
  int min_agents = 1;
  int max_agents = 1;
  int nproc = 1;                      ///< Workers on this host.
  std::optional<int> node_rank = {};  ///< Decides this host's place among the others.
  int max_restarts = 0;
  /// A host that vanishes and leaves fewer than min_agents ends the job. Off: others are waited
  /// for.
  bool ends_with_a_host = false;
  /// The registry lives in one agent's process. Then it has no life of its own: who loses it keeps
  /// its workers until they end.
  bool embedded_registry = false;
  bool hosts_registry = false;            ///< It is this process.
  std::string registry = "the registry";  ///< Which one and where, for messages.
  /// Of the lease. A vanished host is noticed within it.
  std::chrono::milliseconds keep_alive{2'000};
  /// How long the number of agents must stand still before a generation is proposed: hosts of one
  /// job start within moments of each other. At max_agents it is not waited for.
  std::chrono::milliseconds last_call{300};
  /// For min_agents to come, or for the registry to answer. torchrun's.
  std::chrono::milliseconds join_timeout{600'000};
  /// Without contact to the registry for this long: an external one has the workers stopped, as
  /// others may go on without them. An embedded one counts as gone.
  std::chrono::milliseconds contact_limit{60'000};
  /// What others wait beyond contact_limit: for workers to stop, and for a host that was suspended.
  std::chrono::milliseconds contact_margin{30'000};
  /// How long a failure that is a consequence of another waits for its cause. An expired lease may
  /// be the cause, so it is more than keep_alive.
  std::chrono::milliseconds cause_wait{3'000};
};

using Time = std::chrono::steady_clock::time_point;

// ---- Events

/// What has changed under a watched prefix. Of each watch these come in the registry's order and
/// none is missed; the first is `whole`.
struct Changed {
  std::string prefix;                ///< As in `Watch`.
  std::vector<Record> written = {};  ///< With `whole`: all that is there.
  std::vector<std::string> erased = {};
  int64_t revision = 0;  ///< Of the registry, at the last of these changes.
  bool whole = false;
};

/// What became of a CompareAndSet. Each one gets this once.
struct Answered {
  using Outcome = Reply::Outcome;
  uint64_t request = 0;
  Outcome outcome{};                 ///< failed: no answer in time.
  std::optional<Record> entry = {};  ///< done, conflict: what is there now; none: nothing.
  int64_t revision = 0;              ///< Of the registry, when it was carried out.
};

struct LeaseGranted {};
/// The registry says that our latest lease is no longer there, or it granted none in time.
struct LeaseLost {};
/// The registry has prolonged the lease. The shell asks for it every third of keep_alive.
struct LeaseKept {
  Time sent;  ///< When the request was sent.
};
/// All workers of a generation have ended, also because StopWorkers came; or one has failed, where
/// the others live.
struct WorkersEnded {
  int64_t generation = 0;
  launch::HostEnd end = {};
};
/// Or not, where there is an error.
struct StoreOpened {
  int64_t generation = 0;
  std::string address = {};
  uint16_t port = 0;
  std::string error = {};
};
/// The user has interrupted this agent (INT, TERM). The shell forwards the signal to the workers
/// when StopWorkers comes.
struct Leave {};
/// The time that `deadline` named has come.
struct Tick {};

using Event = std::variant<Changed, Answered, LeaseGranted, LeaseLost, LeaseKept, WorkersEnded,
                           StoreOpened, Leave, Tick>;

// ---- Actions

/// Writes `value` where the key's revision is `expected`; 0: where it is not there.
struct CompareAndSet {
  uint64_t request = 0;
  std::string key;
  std::string value;
  int64_t expected = 0;
  bool with_lease = false;  ///< Bound to the lease.
};
struct Watch {
  std::string prefix;
};
/// What of this watch is under way already must not come any more.
struct Unwatch {
  std::string prefix;
};
/// Answered by LeaseGranted or LeaseLost. A lease that was lost is not kept any more.
struct GrantLease {};
/// Revokes the lease, as far as that goes in a short time. Finish follows.
struct LetGoLease {};
/// Answered by StoreOpened. A store of an earlier generation may be closed.
struct OpenStore {
  int64_t generation = 0;
};
/// Workers of an earlier generation that are there at this time go on in this one where they can.
/// Else they are ended first, and WorkersEnded of theirs counts for nothing. Answered by
/// WorkersEnded.
struct StartWorkers {
  std::shared_ptr<const GenerationRecord> record;
  size_t index = 0;  ///< Of this agent in record->members.
};
/// Those that run. Answered by WorkersEnded when none is left. One that is not `interrupted` may
/// follow one that is: then they must be gone soon.
struct StopWorkers {
  bool interrupted = false;  ///< The user did it: they get the time to save a checkpoint.
};
/// The last action, of a kind from `success` on. No worker is left.
using Finish = launch::HostOrder;
/// For the user. A line.
struct Say {
  std::string text;
};

using Action = std::variant<CompareAndSet, Watch, Unwatch, GrantLease, LetGoLease, OpenStore,
                            StartWorkers, StopWorkers, Finish, Say>;

}  // namespace lockstep::elastic
