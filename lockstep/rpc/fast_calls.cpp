// Calls of this worker by the fast path: how they go out, and what ends them.
#include <algorithm>
#include <limits>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/failure.h"
#include "lockstep/rpc/fast_path.h"
#include "lockstep/rpc/worker.h"

namespace lockstep::rpc::detail {
namespace {

const Signature& fetching() {
  static const Signature signature = make_signature("lockstep.rpc.fetch", "(int64) -> any");
  return signature;
}

std::exception_ptr remote_failure(const std::string& text, const std::string& what,
                                  const std::string& types) {
  return decode_failure(std::make_exception_ptr(std::runtime_error(text)), what, types);
}

}  // namespace

void register_fetching() {
  static const bool once = [] {
    register_function(fetching(), [](std::vector<at::IValue>& arguments) {
      if (arguments.size() != 1) throw_other_kind("a ticket", make_tuple(arguments));
      FastPath* const path = this_worker("rpc: a result is fetched")->fast_path();
      if (!path) throw UsageError("rpc: this worker keeps no results for others");
      return HandlerResult{path->take_kept(Value<int64_t>::from(arguments[0])), nullptr};
    });
    return true;
  }();
  static_cast<void>(once);
}

std::shared_ptr<CallState> FastPath::call(int to, const Signature& signature,
                                          const std::vector<at::IValue>& arguments,
                                          std::chrono::milliseconds timeout,
                                          const std::string& what) {
  if (stopped_ || to >= link_->size() || to == link_->rank()) return nullptr;
  std::string bytes;
  if (!encode_request(signature.name, arguments, limits_, bytes)) return nullptr;
  auto state = std::make_shared<CallState>(CallState::Ends::by_itself, weak_from_this());
  const auto number = enter({to, state, Clock::now() + timeout, what, signature.types});
  if (!number) return nullptr;
  state->on_cancel([self = weak_from_this(), number = *number] {
    if (const auto path = self.lock()) path->take_pending(number);
  });
  const FastHead head{static_cast<uint32_t>(Kind::request), *number,
                      static_cast<uint64_t>(HandlerThreads::depth() + 1),
                      static_cast<uint64_t>(signature.hash)};
  if (link_->send(to, head, bytes, FastLink::WhenFull::refuse)) return state;
  take_pending(*number);
  const std::lock_guard lock(mutex_);
  ++refused_;
  return nullptr;
}

uint64_t FastPath::calls_sent() {
  const std::lock_guard lock(mutex_);
  return last_number_ - refused_;
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
  keeper_called_ = true;
  link_->wake(FastLink::keeper);
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
  const auto kind = static_cast<Kind>(answer.head.kind);
  const auto call = take_pending(answer.head.number, answer.from);
  if (kind == Kind::kept_value || kind == Kind::kept_failure) {
    if (call) return fetch_kept(*call, static_cast<int64_t>(answer.head.extra), kind);
    // It was late or cancelled.
    const FastHead drop{static_cast<uint32_t>(Kind::drop), 0, answer.head.extra, 0};
    link_->send(answer.from, drop, {}, FastLink::WhenFull::keep);
  } else if (call) {
    complete(*call, kind, answer.bytes, limits_.depth);
  }
}

void FastPath::complete(const Pending& call, Kind kind, const std::string& bytes, int depth) {
  if (kind != Kind::value) {
    call.state->fail(remote_failure(bytes, call.what, call.types));
    return;
  }
  std::vector<at::IValue> values;
  try {
    values = decode_values(bytes, depth);
    if (values.size() != 1) throw DataError("rpc: an answer of no single value");
  } catch (...) {
    call.state->fail(std::current_exception());
    return;
  }
  call.state->complete(std::move(values.front()));
}

void FastPath::fetch_kept(const Pending& call, int64_t ticket, Kind kind) {
  // The thread may run a function of its own, which is no part of this call.
  const HandlerThreads::HandlerScope no_function(0);
  const auto drop = [link = link_, to = call.to, ticket] {
    const FastHead head{static_cast<uint32_t>(Kind::drop), 0, static_cast<uint64_t>(ticket), 0};
    link->send(to, head, {}, FastLink::WhenFull::keep);
  };
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(call.deadline - Clock::now());
  try {
    const auto fetched =
        send_call_to(call.to, fetching(), {ticket}, std::max(left, std::chrono::milliseconds(1)));
    fetched->when_done([call, kind, drop, state = std::weak_ptr(fetched)] {
      try {
        const at::IValue& value = state.lock()->value({});
        if (kind == Kind::kept_value) {
          call.state->complete(value);
        } else {
          call.state->fail(remote_failure(Value<std::string>::from(value), call.what, call.types));
        }
      } catch (const TimeoutError&) {
        drop();
        call.state->fail(late_failure(call.what));
      } catch (const PeerLostError&) {
        call.state->fail(lost_failure(call.what, "it had the result"));
      } catch (...) {
        drop();
        call.state->fail(std::current_exception());
      }
    });
  } catch (...) {
    drop();
    call.state->fail(std::current_exception());
  }
}

FastPath::Clock::time_point FastPath::expire() {
  std::vector<Pending> late;
  const auto now = Clock::now();
  Clock::time_point next = Clock::time_point::max();
  {
    const std::lock_guard lock(mutex_);
    if (now < next_deadline_) return next_deadline_;
    for (auto it = pending_.begin(); it != pending_.end();) {
      if (it->second.deadline > now) {
        next = std::min(next, it->second.deadline);
        ++it;
        continue;
      }
      late.push_back(std::move(it->second));
      it = pending_.erase(it);
    }
    next_deadline_ = next;
  }
  for (const auto& call : late) call.state->fail(late_failure(call.what));
  return next;
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
  for (const auto& call : lost) call.state->fail(lost_failure(call.what, link_->how_it_went(id)));
  const std::lock_guard lock(mutex_);
  std::erase_if(kept_, [id](const auto& entry) { return entry.second.caller == id; });
}

}  // namespace lockstep::rpc::detail
