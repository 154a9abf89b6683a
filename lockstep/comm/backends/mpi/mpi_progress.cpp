// What the engine's thread does between MPI_Init_thread and MPI_Finalize.
#include <sched.h>

#include <algorithm>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/mpi/mpi_engine.h"
#include "lockstep/comm/backends/mpi/mpi_work.h"
#include "lockstep/comm/checks/failure_kind.h"

namespace lockstep::mpi {
namespace {

using std::chrono::microseconds;

/// How long it polls without a nap while someone waits: longer than a small collective takes.
constexpr microseconds kEager{500};
/// What a slow transport moves in a microsecond: so long are large operations polled eagerly.
constexpr size_t kSlowBytesPerMicrosecond = 500;
constexpr microseconds kShortestNap{20}, kLongestNap{500}, kLongestTick{5000};
constexpr std::chrono::milliseconds kLookForDead{50};
/// The next call often follows at once: a nap would cost it its waking up.
constexpr microseconds kLinger{30};

/// So many requests of a group's collectives are under way before a piece of a large one starts.
constexpr size_t kAtOnce = 4;

}  // namespace

bool Engine::finished() {
  const std::lock_guard lock(mutex_);
  return stop_ && commands_.empty() && (active_.empty() || give_up_);
}

void Engine::pass() {
  if (take_command()) last_event_ = Clock::now();
  poll_works();
}

bool Engine::take_command() {
  if (!has_commands_) return false;
  std::function<void()> command;
  {
    const std::lock_guard lock(mutex_);
    // One by one: a task or a callback may come back to here.
    command = std::move(commands_.front());
    commands_.pop_front();
    has_commands_ = !commands_.empty();
  }
  command();
  return true;
}

void Engine::issue(const WorkPtr& work) {
  Group& group = work->group();
  if (!group.failure.empty()) {
    return work->complete(std::make_exception_ptr(
        CommError(work->text() + " cannot start: the group has failed: " + group.failure)));
  }
  active_.push_back(work);
  if (work->is_collective()) {
    group.queue.insert(group.queue.end(), work->operations(), work);
    return start_queued(group);
  }
  try {
    work->start_next();
  } catch (const std::exception&) {
    give_up(work, std::current_exception());
  }
}

void Engine::start_queued(Group& group) {
  while (!group.queue.empty()) {
    const WorkPtr work = group.queue.front();
    if (work->operations() > 1 && group.under_way >= kAtOnce) return;
    group.queue.pop_front();
    try {
      group.under_way += work->start_next();
    } catch (const std::exception&) {
      give_up(work, std::current_exception());
    }
  }
}

void Engine::poll_works() {
  const auto now = Clock::now();
  if (active_.empty() && abandoned_.empty()) {
    int ignored = 0;  // What has been taken as sent may need progress to leave.
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, world_, &ignored, MPI_STATUS_IGNORE);
    return;
  }
  // By index, and a copy each: callbacks may start or finish other works.
  for (size_t i = 0; i < active_.size(); ++i) {
    const WorkPtr work = active_[i];
    if (!poll(work, now)) continue;
    last_event_ = now;
    i = static_cast<size_t>(-1);  // The list may have changed.
  }
  std::erase_if(abandoned_, [](const WorkPtr& work) { return work->drained(); });
  if (now >= next_look_) {
    next_look_ = now + kLookForDead;
    look_for_dead();
  }
}

/// True when the work has ended and is no longer active.
bool Engine::poll(const WorkPtr& work, Clock::time_point now) {
  const auto end = [&](std::exception_ptr error) {
    std::erase(active_, work);
    work->complete(std::move(error));
    return true;
  };
  try {
    if (const size_t ended = work->test(); ended > 0) {
      last_event_ = now;
      if (work->is_collective()) work->group().under_way -= ended;
      start_queued(work->group());
      if (work->isCompleted()) return true;  // Its next operation did not start.
    }
    if (work->done()) return end(nullptr);
    if (now < work->deadline) return false;
    throw std::runtime_error(work->text() + " timed out after " +
                             seconds_text(work->request().timeout));
  } catch (const MismatchError&) {
    if (!work->is_collective()) return end(std::current_exception());  // The message is over.
    give_up(work, std::current_exception());
  } catch (const std::exception&) {
    give_up(work, std::current_exception());
  }
  return true;
}

void Engine::give_up(const WorkPtr& work, std::exception_ptr error) {
  if (std::erase(active_, work) == 0) return;
  work->cancel();
  abandoned_.push_back(work);
  if (work->is_collective()) fail_group(work->group(), failure_text(error));
  work->complete(std::move(error));
}

void Engine::fail_group(Group& group, const std::string& reason) {
  if (!group.failure.empty()) return;
  group.failure = reason;
  group.queue.clear();
  for (const auto& work : std::vector<WorkPtr>(active_)) {
    if (&work->group() == &group)
      give_up(work,
              std::make_exception_ptr(std::runtime_error(work->text() + " failed: " + reason)));
  }
}

/// mpirun ends all ranks when one dies; but not every launcher does, nor is it always told to.
void Engine::look_for_dead() {
  std::set<Group*> groups;
  for (const auto& work : active_) groups.insert(&work->group());
  for (Group* group : groups) {
    for (int rank = 0; rank < static_cast<int>(group->identities.size()); ++rank) {
      const std::string& identity = group->identities[static_cast<size_t>(rank)];
      if (rank == group->rank || process_state(identity) != ProcessState::ended) continue;
      const std::string who = with_process(rank_list({rank}, group->world_ranks), identity);
      fail_group(*group, "connection closed: the process of " + who + " has ended");
    }
  }
}

void Engine::retire(const std::shared_ptr<Group>& group, bool abort,
                    std::chrono::milliseconds patience) {
  const auto pending = [this, group] {
    return std::any_of(active_.begin(), active_.end(),
                       [&](const WorkPtr& work) { return &work->group() == group.get(); });
  };
  const auto task = [this, group, abort, pending] {
    if (abort) fail_group(*group, "this rank has given the group up");
    progress_until([&] { return !pending(); });
    const bool clean = group->failure.empty();
    if (clean && group->communicator != MPI_COMM_NULL) MPI_Comm_free(&group->communicator);
    group->communicator = MPI_COMM_NULL;
  };
  run(task, patience, "closing the group '" + group->name + "'");
}

void Engine::progress_until(const std::function<bool()>& done) {
  while (!done()) {
    pass();
    if (!done()) pause();
  }
}

void Engine::pause() {
  if (has_commands_) return;
  const auto waited = std::chrono::duration_cast<microseconds>(Clock::now() - last_event_);
  microseconds nap = std::clamp(waited / 20, kShortestNap, kLongestTick);
  if (!active_.empty()) {
    size_t bytes = 0;
    for (const auto& work : active_) bytes = std::max(bytes, work->bytes());
    const microseconds busy(static_cast<int64_t>(bytes / kSlowBytesPerMicrosecond));
    if (waited < busy + (waiters_ > 0 ? kEager : microseconds(0))) {
      ::sched_yield();
      return;
    }
    nap = std::min(nap, kLongestNap);
  } else if (!abandoned_.empty()) {
    nap = kLongestTick;
  } else if (waited < kLinger) {
    ::sched_yield();
    return;
  }
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, nap, [this] { return !commands_.empty() || (stop_ && active_.empty()); });
}

}  // namespace lockstep::mpi
