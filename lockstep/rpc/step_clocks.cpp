#include "lockstep/rpc/step_clocks.h"

#include <algorithm>
#include <limits>

#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/rpc/batched.h"

namespace lockstep::rpc::detail {
namespace {

using std::chrono::milliseconds;

/// The slowest clock where no one counts. Who waits for it waits for all others to finish.
constexpr int64_t kNobody = std::numeric_limits<int64_t>::max();
constexpr int64_t kNoBound = std::numeric_limits<int64_t>::min();

std::string text_of(const StepClocks::Terms& terms) {
  return "workers '" + join(terms.workers, "', '") + "', max_staleness " +
         (terms.max_staleness ? std::to_string(*terms.max_staleness) : "none") + ", timeout " +
         (terms.timeout_ms ? std::to_string(*terms.timeout_ms) + " ms" : "none");
}

}  // namespace

int64_t StepClocks::Bound::slowest() const {
  int64_t slowest = kNobody;
  for (const auto& [worker, member] : members) slowest = std::min(slowest, member.clock);
  return slowest;
}

StepClocks::Answer StepClocks::Bound::answer(End end, int64_t slowest_needed) const {
  Answer answer{end, slowest(), {}};
  if (end != End::stalled) return answer;
  for (const auto& [worker, member] : members) {
    if (member.clock < slowest_needed) answer.behind.emplace_back(worker, member.clock);
  }
  return answer;
}

void StepClocks::check_terms(const std::string& name, const Terms& terms) {
  const std::string what = "rpc::StalenessBound '" + name + "': ";
  if (terms.workers.empty()) throw UsageError(what + "no workers; expected at least one");
  if (terms.max_staleness.value_or(0) < 0) {
    throw UsageError(what + "max_staleness is " + std::to_string(*terms.max_staleness) +
                     "; expected at least 0, or none");
  }
  if (terms.timeout_ms) check_timeout(what + "timeout", milliseconds(*terms.timeout_ms));
}

StepClocks::Bound StepClocks::make_bound(const Terms& terms,
                                         const std::function<bool(const std::string&)>& is_here) {
  Bound bound;
  bound.terms = terms;
  bound.timeout = terms.timeout_ms ? milliseconds(*terms.timeout_ms) : default_timeout();
  bound.number = ++last_number_;
  bound.moved = Clock::now();
  for (const auto& worker : terms.workers) {
    if (is_here(worker)) bound.members[worker];
  }
  return bound;
}

StepClocks::Part StepClocks::enter(const std::string& name, const Terms& terms,
                                   const std::string& worker, int id,
                                   const std::function<bool(const std::string&)>& is_here) {
  check_terms(name, terms);
  const std::lock_guard lock(mutex_);
  auto found = bounds_.find(name);
  if (found == bounds_.end()) found = bounds_.emplace(name, make_bound(terms, is_here)).first;
  Bound& bound = found->second;
  if (bound.terms != terms) {
    throw UsageError("rpc::StalenessBound '" + name + "': worker '" + worker + "' gives " +
                     text_of(terms) + "; another one gave " + text_of(bound.terms));
  }
  const int64_t slowest = bound.slowest();
  Member& member = bound.members[worker];
  if (member.id > id) {  // A later one has the name.
    throw UsageError("rpc::StalenessBound '" + name + "': worker '" + worker + "' is gone");
  }
  member = {id, ++last_number_, slowest == kNobody ? 0 : slowest};
  return {member.number, member.clock, bound.timeout.count()};
}

Future<StepClocks::Answer> StepClocks::reach(const std::string& name, int64_t number,
                                             int64_t clock) {
  Answers answers;
  Future<Answer> future;
  {
    const std::lock_guard lock(mutex_);
    const auto found = bounds_.find(name);
    Member* member = nullptr;
    if (found != bounds_.end()) {
      for (auto& [worker, its] : found->second.members) {
        if (its.number == number) member = &its;
      }
    }
    if (!member) {
      throw UsageError("rpc::StalenessBound '" + name + "': the worker takes no part any more");
    }
    Bound& bound = found->second;
    if (clock > member->clock) {
      member->clock = clock;
      moved(name, answers);
    }
    const auto& limit = bound.terms.max_staleness;
    future = wait_for(name, bound, limit ? clock - *limit : kNoBound);
  }
  give(answers);
  return future;
}

Future<StepClocks::Answer> StepClocks::finish(const std::string& name, int64_t number) {
  Answers answers;
  Future<Answer> future;
  {
    const std::lock_guard lock(mutex_);
    end_part(name, number, answers);
    const auto found = bounds_.find(name);
    // A later one of the name has other workers to wait for.
    if (found != bounds_.end() && found->second.number < number) {
      future = wait_for(name, found->second, kNobody);
    } else {
      const Promise<Answer> done;
      future = done.future();
      done.set_value({End::reached, kNobody, {}});
    }
  }
  give(answers);
  return future;
}

void StepClocks::leave(const std::string& name, int64_t number) {
  Answers answers;
  {
    const std::lock_guard lock(mutex_);
    end_part(name, number, answers);
  }
  give(answers);
}

void StepClocks::gone(int id, const std::string& worker, bool name_is_free) {
  Answers answers;
  {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> changed;
    for (auto& [name, bound] : bounds_) {
      const size_t ended = std::erase_if(bound.members, [&](const auto& entry) {
        const Member& member = entry.second;
        return member.id == id || (name_is_free && member.id < 0 && entry.first == worker);
      });
      if (ended > 0) changed.push_back(name);
    }
    for (const auto& name : changed) moved(name, answers);
  }
  give(answers);
}

void StepClocks::end_part(const std::string& name, int64_t number, Answers& answers) {
  const auto found = bounds_.find(name);
  if (found == bounds_.end()) return;
  const size_t ended = std::erase_if(
      found->second.members, [&](const auto& entry) { return entry.second.number == number; });
  if (ended > 0) moved(name, answers);
}

void StepClocks::moved(const std::string& name, Answers& answers) {
  Bound& bound = bounds_.at(name);
  bound.moved = Clock::now();
  const int64_t slowest = bound.slowest();
  std::erase_if(bound.waiters, [&](const Waiter& waiter) {
    if (waiter.slowest_needed > slowest) return false;
    answers.emplace_back(waiter.promise, bound.answer(End::reached, waiter.slowest_needed));
    return true;
  });
  if (bound.members.empty()) bounds_.erase(name);
}

Future<StepClocks::Answer> StepClocks::wait_for(const std::string& name, Bound& bound,
                                                int64_t slowest_needed) {
  const Promise<Answer> promise;
  if (bound.slowest() >= slowest_needed) {
    promise.set_value(bound.answer(End::reached, slowest_needed));
  } else {
    bound.waiters.push_back({slowest_needed, Clock::now(), promise});
    if (!bound.watched) watch(name, bound, bound.timeout);
  }
  return promise.future();
}

void StepClocks::watch(const std::string& name, Bound& bound, milliseconds delay) {
  bound.watched = true;
  run_later(delay, [weak = weak_from_this(), name, number = bound.number] {
    if (const auto clocks = weak.lock()) clocks->look_at_waits(name, number);
  });
}

void StepClocks::look_at_waits(const std::string& name, int64_t bound_number) {
  Answers answers;
  {
    const std::lock_guard lock(mutex_);
    const auto found = bounds_.find(name);
    if (found == bounds_.end() || found->second.number != bound_number) return;
    Bound& bound = found->second;
    const auto now = Clock::now();
    auto next = now + bound.timeout;
    std::erase_if(bound.waiters, [&](const Waiter& waiter) {
      const auto ends = waiter.since + bound.timeout;
      if (ends > now) {
        next = std::min(next, ends);
        return false;
      }
      const End end = bound.moved > waiter.since ? End::not_yet : End::stalled;
      answers.emplace_back(waiter.promise, bound.answer(end, waiter.slowest_needed));
      return true;
    });
    bound.watched = false;
    try {
      if (!bound.waiters.empty()) watch(name, bound, std::chrono::ceil<milliseconds>(next - now));
    } catch (const UsageError&) {  // This worker leaves, and with it all that wait here.
    }
  }
  give(answers);
}

void StepClocks::give(const Answers& answers) {
  for (const auto& [promise, answer] : answers) promise.set_value(answer);
}

}  // namespace lockstep::rpc::detail
