#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/checks/observed_call.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace lockstep {

class CheckContext;

/// Makes another error of one. Any thread.
using ErrorConversion = std::function<std::exception_ptr(std::exception_ptr)>;

struct CheckedBackendOptions {
  /// `detail` compares all collectives, `info` the first ten of a backend that needs it: enough for
  /// the start of a job, where mistakes show, and free after it. The same number of sends and
  /// receives is compared for each (sender, receiver, tag). Errors are translated at every level.
  DebugLevel debug = DebugLevel::info;
  /// As the backend's traits say: a mismatch aborts, hangs or gives wrong data.
  bool needs_comparison = true;
  /// Likewise: the errors of its works are ours already and name the ranks at fault.
  bool names_failures = false;
  /// Likewise: waits for its collectives look for ranks that died, as BackendTraits has it.
  bool misses_deaths = false;
  /// The default group's rank of each rank of this group, for messages; empty: the same numbers.
  std::vector<int> global_ranks;
  /// What the backend itself was given. A call's own time-out wins.
  std::chrono::milliseconds timeout{120'000};
  /// For messages. The store must be this group's alone, or the name unique in it.
  std::string group_name = "default";
  /// What callers get in place of an error: from a call, a work or its future. Empty: the error.
  /// For programs that know another family of errors than ours.
  ErrorConversion convert = {};
  /// BackendOptions::steps.
  std::shared_ptr<const std::atomic<int64_t>> steps = {};
  /// Its calls are noted in FlightRecorder::of_process. Not those of a group within a backend.
  bool recorded = false;
  /// What the checks share, for code that tells and hears of failures there as well. It is
  /// of this group's store, rank, size, names, name and time-out. Empty: the backend makes it.
  std::shared_ptr<CheckContext> context = {};
};

/// LOCKSTEP_DEBUG, else DETAIL of TORCH_DISTRIBUTED_DEBUG, else `info`.
DebugLevel debug_level();

/// Tells the group's other ranks which process this one is and that it compares its calls. At `off`
/// it tells that nobody is to compare. Costs one message to the store, without an answer (at `off`,
/// a round trip). Every rank calls it before its backend is built, and building that waits for all
/// ranks (a full mesh). So a rank that has not is known to be one that does not take part (a Python
/// process).
void announce_checks(c10d::Store& store, int rank, const std::string& group_name = "default",
                     DebugLevel debug = DebugLevel::info);

/// Decorates a backend:
/// - Before a collective (see CheckedBackendOptions for which ones) it compares the ranks' calls
///   over the store: sequence number, operation, dtype, shape, root, reduction, splits. A
///   difference throws MismatchError on every rank, naming both sides. A rank that does not come
///   gives a TimeoutError naming it. A rank that has ended or left the group gives a PeerLostError.
///   The call blocks until all ranks have come.
/// - Sends and receives of CPU tensors are compared by the side that comes second. Neither call
///   blocks. Their waits throw as above, and give a PeerLostError also where the other rank has
///   closed the group or given it up. Receives from any rank are not compared.
/// - Time-outs and lost connections of the backend (at the call, from Work::wait, from the future)
///   become TimeoutError and PeerLostError. These name operation, sequence number, ranks and
///   seconds. The rank at fault is found from the processes that have ended on this host and from
///   what the others report to the store. That takes up to a second, after the failure only.
/// - Where the backend may miss a death, Work::wait of a collective looks for ranks of this host
///   that have ended without shutting the group down. Two to four seconds later it throws
///   PeerLostError, though the backend waits on. Futures and reduce_scatter end with the backend
///   only.
/// - From then on the process ignores SIGPIPE, unless it has a handler of its own. A write to a
///   lost peer would otherwise end it without a word.
///
/// Errors of use (a wrong device, a wrong number of tensors) pass as they are.
///
/// Where a rank did not announce itself nothing is compared, on no rank. Ranks of different options
/// compare as much as the one that makes the first call says. A group of one compares nothing.
/// c10d's split, merge and shrink are not offered. Threads: as the backend.
c10::intrusive_ptr<c10d::Backend> make_checked_backend(c10::intrusive_ptr<c10d::Backend> inner,
                                                       c10::intrusive_ptr<c10d::Store> store,
                                                       CheckedBackendOptions options = {});

/// Whether such a wait has ended before the backend: then the backend's destructor may block.
bool has_abandoned_work(const c10d::Backend& backend);

/// The backend inside a decorated one; `backend` itself when it is not decorated.
c10::intrusive_ptr<c10d::Backend> unchecked_backend(
    const c10::intrusive_ptr<c10d::Backend>& backend);

class CallObserver;
/// See observe_calls, which is the way for a group. `backend` must be a decorated
/// one.
void set_call_observer(c10d::Backend& backend, std::shared_ptr<CallObserver> observer);

}  // namespace lockstep
