#include "lockstep/rpc/staleness_bound.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/step_clocks.h"
#include "lockstep/rpc/worker.h"

namespace lockstep::rpc {
namespace {

using detail::StepClocks;
using std::chrono::milliseconds;

StepClocks::Part enter_here(const std::string& bound, const StepClocks::Terms& terms,
                            const std::string& name, int id) {
  const auto worker = detail::this_worker("rpc::StalenessBound");
  const auto is_here = [&](const std::string& other) {
    return other == worker->name() || worker->peers().is_here(other);
  };
  // By its number, as another one may have its name by now.
  const auto is_gone = [&] { return worker->peers().is_gone(id); };
  if (is_gone()) throw UsageError("rpc::StalenessBound: worker '" + name + "' is gone");
  StepClocks& clocks = worker->step_clocks();
  const auto part = clocks.enter(bound, terms, name, id, is_here);
  if (is_gone()) clocks.gone(id, name, !is_here(name));  // Its death was told of meanwhile.
  return part;
}

Future<StepClocks::Answer> reach_here(const std::string& bound, int64_t number, int64_t clock) {
  return detail::this_worker("rpc::StalenessBound")->step_clocks().reach(bound, number, clock);
}

Future<StepClocks::Answer> finish_here(const std::string& bound, int64_t number) {
  return detail::this_worker("rpc::StalenessBound")->step_clocks().finish(bound, number);
}

void leave_here(const std::string& bound, int64_t number) {
  detail::this_worker("rpc::StalenessBound")->step_clocks().leave(bound, number);
}

struct Functions {
  decltype(function("", enter_here)) enter = function("lockstep.rpc.clocks.enter", enter_here);
  decltype(function("", reach_here)) reach = function("lockstep.rpc.clocks.reach", reach_here);
  decltype(function("", finish_here)) finish = function("lockstep.rpc.clocks.finish", finish_here);
  decltype(function("", leave_here)) leave = function("lockstep.rpc.clocks.leave", leave_here);
};

const Functions& functions() {
  static const Functions all;
  return all;
}

StepClocks::Terms terms_of(const StalenessOptions& options) {
  StepClocks::Terms terms{options.workers, options.max_staleness, {}};
  if (options.timeout) terms.timeout_ms = options.timeout->count();
  std::sort(terms.workers.begin(), terms.workers.end());
  return terms;
}

std::string names_with_steps(const std::vector<std::pair<std::string, int64_t>>& workers) {
  std::vector<std::string> texts;
  for (const auto& [name, clock] : workers) {
    texts.push_back("'" + name + "' at step " + std::to_string(clock));
  }
  return join(texts, ", ");
}

}  // namespace

namespace detail {

void register_staleness_functions() {
  functions();
}

}  // namespace detail

StalenessBound::StalenessBound(std::string server, const StalenessOptions& options)
    : server_(std::move(server)), name_(options.name) {
  const auto self = detail::this_worker("rpc::StalenessBound");
  const auto part =
      call(server_, functions().enter, name_, terms_of(options), self->name(), self->id());
  number_ = part.number;
  clock_ = part.clock;
  timeout_ = milliseconds(part.timeout_ms);
}

StalenessBound::~StalenessBound() {
  if (finished_) return;
  try {
    call_async(server_, functions().leave, name_, number_);
  } catch (const std::exception&) {  // The agent is gone, of which the server hears.
  }
}

int64_t StalenessBound::step() {
  ++clock_;
  wait_for_others(false);
  return clock_ - slowest_;
}

void StalenessBound::finish() {
  if (finished_) return;
  wait_for_others(true);
  finished_ = true;
}

void StalenessBound::wait_for_others(bool last) {
  // The server answers within its time-out, also when the wait goes on.
  const Destination to(
      server_, std::min<milliseconds>(timeout_ + detail::default_timeout(), kLongestTimeout));
  for (;;) {
    const auto answer = last ? call(to, functions().finish, name_, number_)
                             : call(to, functions().reach, name_, number_, clock_);
    slowest_ = answer.slowest;
    if (answer.end == StepClocks::End::reached) return;
    if (answer.end == StepClocks::End::not_yet) continue;
    throw TimeoutError("rpc: at step " + std::to_string(clock_) + " of the bound '" + name_ +
                           "' on worker '" + server_ + "': waited for " +
                           names_with_steps(answer.behind) + ". Nobody made a step for " +
                           seconds_text(timeout_),
                       "StalenessOptions::timeout is how long it waits");
  }
}

}  // namespace lockstep::rpc
