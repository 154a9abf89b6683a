// What the engine's thread does between MPI_Init_thread and MPI_Finalize.
#include <sched.h>

#include <algorithm>

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

/// What waits for the group's large collective has a time-out, too.
bool is_late(const Group& group, std::chrono::steady_clock::time_point now) {
  return std::any_of(group.waiting.begin(), group.waiting.end(),
                     [&](const auto& work) { return now >= work->deadline; });
}

}  // namespace

bool Engine::finished() {
  const std::lock_guard lock(mutex_);
  return stop_ && commands_.empty() && (active_.empty() || give_up_);
}

void Engine::pass() {
  if (take_commands()) last_event_ = Clock::now();
  poll_works();
}

bool Engine::take_commands() {
  if (!has_commands_) return false;
  std::deque<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    // One by one: a task or a callback may come back to here.
    if (commands_.empty()) return false;
    commands.push_back(std::move(commands_.front()));
    commands_.pop_front();
    has_commands_ = !commands_.empty();
  }
  Command& command = commands.front();
  if (command.work) {
    issue(command.work);
  } else {
    command.task();
  }
  return true;
}

void Engine::issue(const WorkPtr& work) {
  Group& group = work->group();
  if (!group.failure.empty()) {
    return work->complete(std::make_exception_ptr(
        CommError(work->text() + " cannot start: the group has failed: " + group.failure)));
  }
  if (group.starting && work->is_collective()) {
    group.waiting.push_back(work);
  } else {
    begin(work);
  }
}

void Engine::begin(const WorkPtr& work) {
  try {
    work->start();
  } catch (const std::exception& error) {
    if (work->is_collective()) work->group().failure = error.what();
    return give_up(work, std::current_exception());
  }
  if (!work->all_started()) work->group().starting = work;
  active_.push_back(work);
}

void Engine::begin_waiting(Group& group) {
  if (group.starting && !group.starting->all_started()) return;
  group.starting.reset();
  while (!group.starting && !group.waiting.empty() && group.failure.empty()) {
    const WorkPtr next = group.waiting.front();
    group.waiting.pop_front();
    begin(next);
  }
  if (!group.failure.empty()) fail_waiting(group);
}

void Engine::fail_waiting(Group& group) {
  while (!group.waiting.empty()) {
    const WorkPtr work = group.waiting.front();
    group.waiting.pop_front();
    issue(work);
  }
}

void Engine::poll_works() {
  const auto now = Clock::now();
  if (active_.empty() && abandoned_.empty()) {
    int ignored = 0;  // What has been taken as sent may need progress to leave.
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &ignored, MPI_STATUS_IGNORE);
    return;
  }
  // By index, and a copy each: callbacks may start or finish other works.
  for (size_t i = 0; i < active_.size(); ++i) {
    const WorkPtr work = active_[i];
    if (!poll(work, now)) continue;
    last_event_ = now;
    i = static_cast<size_t>(-1);  // The list may have changed.
  }
  for (size_t i = abandoned_.size(); i-- > 0;) {
    if (!abandoned_[i]->drained()) continue;
    abandoned_[i]->release();
    abandoned_.erase(abandoned_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (now >= next_look_) {
    next_look_ = now + kLookForDead;
    look_for_dead();
  }
}

/// True when the work has ended and is no longer active.
bool Engine::poll(const WorkPtr& work, Clock::time_point now) {
  const auto remove = [&] { active_.erase(std::find(active_.begin(), active_.end(), work)); };
  std::exception_ptr error;
  try {
    const MpiWork::Progress progress = work->test();
    if (progress != MpiWork::Progress::none) {
      last_event_ = now;
      begin_waiting(work->group());
    }
    if (progress == MpiWork::Progress::done) {
      remove();
      work->release();
      work->complete(nullptr);
      return true;
    }
  } catch (const MismatchError&) {
    error = std::current_exception();
    if (!work->is_collective()) {  // The message is over.
      remove();
      work->release();
      work->complete(error);
      return true;
    }
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  const bool holds_up = work == work->group().starting && is_late(work->group(), now);
  if (!error && (now >= work->deadline || holds_up)) {
    error = std::make_exception_ptr(
        std::runtime_error(work->text() + " timed out after " + seconds_text(work->timeout())));
  }
  if (!error) return false;
  if (work->is_collective() && work->group().failure.empty())
    work->group().failure = failure_text(error);
  remove();
  give_up(work, error);
  return true;
}

void Engine::give_up(const WorkPtr& work, std::exception_ptr error) {
  Group& group = work->group();
  work->cancel();
  abandoned_.push_back(work);
  work->complete(std::move(error));
  if (group.starting == work) group.starting.reset();
  if (!group.failure.empty()) fail_waiting(group);
}

void Engine::fail_group(Group& group, const std::string& reason) {
  group.failure = reason;
  std::vector<WorkPtr> failed;
  for (const auto& work : active_) {
    if (&work->group() == &group) failed.push_back(work);
  }
  fail_waiting(group);
  for (const auto& work : failed) {
    const auto at = std::find(active_.begin(), active_.end(), work);
    if (at == active_.end()) continue;
    active_.erase(at);
    give_up(work, std::make_exception_ptr(std::runtime_error(work->text() + " failed: " + reason)));
  }
}

/// mpirun ends all ranks when one dies; but not every launcher does, nor is it always told to.
void Engine::look_for_dead() {
  std::vector<Group*> groups;
  for (const auto& work : active_) {
    if (std::find(groups.begin(), groups.end(), &work->group()) == groups.end())
      groups.push_back(&work->group());
  }
  for (Group* group : groups) {
    for (size_t rank = 0; rank < group->identities.size(); ++rank) {
      const std::string& identity = group->identities[rank];
      if (static_cast<int>(rank) == group->rank || process_state(identity) != ProcessState::ended)
        continue;
      fail_group(*group, "connection closed: the process of " +
                             with_process(rank_list({static_cast<int>(rank)}, group->world_ranks),
                                          identity) +
                             " has ended");
      break;
    }
  }
}

void Engine::retire(const std::shared_ptr<Group>& group, bool abort,
                    std::chrono::milliseconds patience) {
  const auto pending = [this, group] {
    return !group->waiting.empty() ||
           std::any_of(active_.begin(), active_.end(),
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
