// Calls of this worker by the fast path: how they go out, and what ends them.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/rpc/fast_path.h"
#include "lockstep/rpc/remote_failure.h"

namespace lockstep::rpc::detail {
std::shared_ptr<CallState> FastPath::call(int to, const Signature& signature,
                                          const std::vector<at::IValue>& arguments,
                                          std::chrono::milliseconds timeout,
                                          const std::string& what) {
  if (stopped_ || to >= link_->size() || to == link_->rank()) return nullptr;
  std::string bytes;
  if (!encode_values(packed_call(signature, arguments), kLimits, bytes)) return nullptr;
  auto state = std::make_shared<CallState>(CallState::Ends::by_itself, weak_from_this());
  const auto number = enter({to, state, Clock::now() + timeout, what, signature.types});
  if (!number) return nullptr;
  if (link_->send(to, {static_cast<uint32_t>(Kind::request), *number}, bytes)) return state;
  take_pending(*number);
  return nullptr;
}

uint64_t FastPath::calls_sent() {
  const std::lock_guard lock(mutex_);
  return last_number_;
}

std::optional<uint64_t> FastPath::enter(Pending pending) {
  const Clock::time_point deadline = pending.deadline;
  uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return std::nullopt;
    number = ++last_number_;
    pending_.emplace(number, std::move(pending));
    if (deadline >= next_deadline_) return number;
    next_deadline_ = deadline;
  }
  poller_called_ = true;
  link_->wake(FastLink::poller);
  return number;
}

std::optional<FastPath::Pending> FastPath::take_pending(uint64_t number, std::optional<int> from) {
  const std::lock_guard lock(mutex_);
  const auto found = pending_.find(number);
  if (found == pending_.end() || (from && *from != found->second.to)) return std::nullopt;
  std::optional<Pending> taken(std::move(found->second));
  pending_.erase(found);
  return taken;
}

std::vector<FastPath::Pending> FastPath::take_pending_if(
    const std::function<bool(const Pending&)>& is_meant) {
  std::vector<Pending> taken;
  const std::lock_guard lock(mutex_);
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (!is_meant(it->second)) {
      ++it;
      continue;
    }
    taken.push_back(std::move(it->second));
    it = pending_.erase(it);
  }
  return taken;
}

void FastPath::on_answer(const FastMessage& answer) {
  const auto call = take_pending(answer.head.number, answer.from);
  if (!call) return;  // It was late or cancelled.
  if (static_cast<Kind>(answer.head.kind) != Kind::value) return fail(*call, answer.bytes);
  std::vector<at::IValue> values;
  try {
    values = decode_values(answer.bytes, kLimits.depth);
    if (values.size() != 1) throw DataError("rpc: an answer of no single value");
  } catch (...) {
    call->state->fail(std::current_exception());
    return;
  }
  call->state->complete(std::move(values.front()));
}

void FastPath::on_delivery(int from, uint64_t number, const CallOutcome& outcome) {
  const auto call = take_pending(number, from);
  if (!call) return;
  if (outcome.failure) return fail(*call, *outcome.failure);
  call->state->complete(outcome.value);
}

void FastPath::fail(const Pending& call, const std::string& remote_failure) {
  call.state->fail(decode_failure(std::make_exception_ptr(std::runtime_error(remote_failure)),
                                  call.what, call.types));
}

FastPath::Clock::time_point FastPath::expire() {
  const auto now = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (now < next_deadline_) return next_deadline_;
  }
  const auto late = take_pending_if([now](const Pending& call) { return call.deadline <= now; });
  for (const auto& call : late) call.state->fail(late_failure(call.what));
  const std::lock_guard lock(mutex_);
  next_deadline_ = Clock::time_point::max();
  for (const auto& [number, call] : pending_)
    next_deadline_ = std::min(next_deadline_, call.deadline);
  return next_deadline_;
}

void FastPath::lose(int id) {
  if (id >= link_->size() || id == link_->rank()) return;
  link_->lose(id);
  // What it left behind, a turn's bytes at a time. Others may send without end.
  constexpr int kMostTurns = 64;
  for (int turn = 0; turn < kMostTurns && link_->look(); ++turn) take();
  take_and_go();
  fail_calls_to(id);
}

void FastPath::fail_calls_to(int id) {
  const auto lost = take_pending_if([id](const Pending& call) { return call.to == id; });
  for (const auto& call : lost) call.state->fail(lost_failure(call.what, link_->describe_end(id)));
}

}  // namespace lockstep::rpc::detail
