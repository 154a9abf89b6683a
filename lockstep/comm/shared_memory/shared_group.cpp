#include "lockstep/comm/shared_memory/shared_group.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/futex.h"

namespace lockstep::shm {
namespace {

using Clock = std::chrono::steady_clock;

/// How long a wait sleeps before it looks who is alive: a look reads a file of /proc a rank.
constexpr std::chrono::milliseconds kSlice{20};
/// Who writes a verdict and dies over it leaves it unfinished.
constexpr std::chrono::milliseconds kWriting{100};

}  // namespace

SharedGroup::SharedGroup(SharedGroupOptions options, const Meeting& meeting)
    : segment_(options.segment, meeting),
      names_(std::move(options.names)),
      judge_(std::move(options.judge)),
      spin_(options.spin),
      most_spin_(std::max(options.spin, options.caller_spin)),
      caller_spin_(options.spin, options.caller_spin) {
  for (int rank = static_cast<int>(names_.size()); rank < size(); ++rank) names_.push_back(rank);
}

void SharedGroup::begin(const Call& call) {
  if (failed()) throw_if_failed(call.text());
  hash_ = call.hash();
  header_of(rank(), step_ + 1).call = hash_;
  segment_.record(rank()).calls.store(++calls_, std::memory_order_relaxed);
}

void SharedGroup::arrive() {
  ++step_;
  if (size() == 1) return;
  segment_.header().barrier.arrive(step_, size());
  // Afterwards: who dies before it has arrived must not be taken for one that has, or the others
  // would find nobody missing and wait for ever.
  segment_.record(rank()).step.store(step_, std::memory_order_release);
}

void SharedGroup::await(const Call& call, std::chrono::milliseconds timeout, Waiter waiter) {
  if (waiter == Waiter::caller && has_processor()) {
    await_as_caller(call, timeout);
  } else if (!all_here(spin())) {
    wait_for_all(call, timeout);
  }
}

void SharedGroup::await_as_caller(const Call& call, std::chrono::milliseconds timeout) {
  if (all_here({})) return;
  const auto begin = Clock::now();
  if (!all_here(caller_spin_.now())) wait_for_all(call, timeout);
  caller_spin_.learn(Clock::now() - begin);
}

void SharedGroup::wait_for_all(const Call& call, std::chrono::milliseconds timeout) {
  auto& barrier = segment_.header().barrier;
  const auto deadline = Clock::now() + timeout;
  auto look = Clock::now() + kSlice;
  while (!barrier.reached(step_, size())) {
    if (failed()) throw_if_failed(call.text(), names_of(missing()));
    barrier.sleep(step_, size(), kSlice);
    const auto now = Clock::now();
    if (now < look) continue;
    look = now + kSlice;
    const std::vector<int> absent = missing();
    if (absent.empty() || notice_lost(absent) || now < deadline) continue;
    give_up(Verdict::timed_out, late(absent, timeout));
  }
}

bool SharedGroup::find_processor() const {
  std::vector<ProcessorSet> ranks;
  for (int other = 0; other < size(); ++other) {
    const auto& record = segment_.record(other);
    if (record.bound.load(std::memory_order_acquire) == 0) return false;
    ranks.push_back(record.processors);
  }
  const bool has = has_own_processor(ranks, static_cast<size_t>(rank()));
  has_processor_.store(has ? Known::yes : Known::no, std::memory_order_relaxed);
  return has;
}

void SharedGroup::compare(const Call& call, std::chrono::milliseconds timeout) {
  for (int other = 0; other < size(); ++other) {
    if (header_of(other, step_).call != hash_) differ(call, timeout);
  }
}

void SharedGroup::differ(const Call& call, std::chrono::milliseconds timeout) {
  throw MismatchError(judge_(tell_calls(call, timeout)));
}

std::vector<std::string> SharedGroup::tell_calls(const Call& call,
                                                 std::chrono::milliseconds timeout) {
  std::string mine = call.encoded();
  mine.resize(std::min(mine.size(), slot_bytes() - sizeof(uint64_t)));
  const uint64_t length = mine.size();
  std::byte* slot = give(slot_bytes());
  std::memcpy(slot, &length, sizeof(length));
  std::memcpy(slot + sizeof(length), mine.data(), mine.size());
  arrive();
  await(call, timeout);
  std::vector<std::string> calls;
  for (int other = 0; other < size(); ++other) {
    const std::byte* theirs = given(other, slot_bytes());
    uint64_t bytes = 0;
    std::memcpy(&bytes, theirs, sizeof(bytes));
    calls.emplace_back(reinterpret_cast<const char*>(theirs + sizeof(bytes)),
                       std::min<size_t>(bytes, slot_bytes() - sizeof(bytes)));
  }
  return calls;
}

void SharedGroup::give_up(Verdict::Kind kind, const std::string& cause) noexcept {
  auto& verdict = segment_.header().verdict;
  uint32_t expected = Verdict::none;
  if (!verdict.kind.compare_exchange_strong(expected, Verdict::writing)) return;
  store_text(verdict.text, cause);
  verdict.kind.store(kind, std::memory_order_seq_cst);
  wake_all(segment_.header().barrier.count);
}

void SharedGroup::throw_if_failed(const std::string& what,
                                  const std::vector<std::string>& awaited) const {
  const auto& verdict = segment_.header().verdict;
  uint32_t kind = verdict.kind.load(std::memory_order_acquire);
  if (kind == Verdict::none) return;
  for (const auto end = Clock::now() + kWriting; kind == Verdict::writing && Clock::now() < end;) {
    spin_pause();
    kind = verdict.kind.load(std::memory_order_acquire);
  }
  const std::string me = "rank " + std::to_string(names_[static_cast<size_t>(rank())]) + ": ";
  std::string cause =
      kind == Verdict::writing ? "a rank ended while it told of a failure" : verdict.text.data();
  for (const std::string& other : awaited) {
    const std::string name = other.substr(0, other.find(','));
    if (kind == Verdict::given_up && cause.find(name) == std::string::npos)
      cause += "; " + other + " had not come";
  }
  if (kind != Verdict::timed_out) throw_peer_lost(me + what + " cannot finish: " + cause);
  throw TimeoutError(me + what + " did not finish: " + cause,
                     "do all ranks make the same calls? Else give a longer time-out");
}

std::vector<int> SharedGroup::missing() const {
  std::vector<int> ranks;
  for (int other = 0; other < size(); ++other) {
    if (segment_.record(other).step.load(std::memory_order_acquire) < step_) ranks.push_back(other);
  }
  return ranks;
}

bool SharedGroup::gone(int rank) const {
  const auto& record = segment_.record(rank);
  const RankState state = record.state.load(std::memory_order_acquire);
  if (state == RankState::absent) return false;
  return state == RankState::left || segment_.has_ended(rank);
}

bool SharedGroup::notice_lost(const std::vector<int>& ranks) {
  std::vector<std::string> lost;
  for (const int other : ranks) {
    if (!gone(other)) continue;
    const auto& record = segment_.record(other);
    // It may have arrived and gone since: then all that it had to give is there.
    if (record.step.load(std::memory_order_acquire) >= step_) continue;
    lost.push_back(how_it_went(other));
  }
  if (lost.empty()) return false;
  give_up(Verdict::lost, join(lost, ", "));
  return true;
}

void SharedGroup::look_after(const std::vector<int>& ranks, const std::string& what) {
  throw_if_failed(what);
  std::vector<std::string> lost;
  for (const int other : ranks) {
    if (gone(other)) lost.push_back(how_it_went(other));
  }
  if (lost.empty()) return;
  give_up(Verdict::lost, join(lost, ", "));
  throw_if_failed(what);
}

std::string SharedGroup::late(const std::vector<int>& ranks,
                              std::chrono::milliseconds timeout) const {
  std::vector<std::string> parts;
  for (const int other : ranks) {
    const uint64_t calls = segment_.record(other).calls.load(std::memory_order_relaxed);
    const bool behind = calls < calls_;
    parts.push_back(name(other) + (behind ? " did not come" : " came but does not go on") +
                    (behind ? " (it has called " + std::to_string(calls) + " of the group's " +
                                  std::to_string(calls_) + " collectives)"
                            : ""));
  }
  return join(parts, "; ") + " within " + seconds_text(timeout);
}

std::string SharedGroup::how_it_went(int rank) const {
  const auto& record = segment_.record(rank);
  const bool left = record.state.load(std::memory_order_acquire) == RankState::left;
  const std::string cause = noted_cause(rank);
  const int64_t rounds = record.rounds.load(std::memory_order_relaxed);
  if (left && cause.empty() && rounds > 0) return name(rank) + left_after(rounds);
  return name(rank) + (left ? " has closed the group" : " has ended") + cause;
}

std::string SharedGroup::noted_cause(int rank) const {
  const auto& record = segment_.record(rank);
  if (record.caused.load(std::memory_order_acquire) == 0) return {};
  return std::string(": ") + record.cause.data();
}

void SharedGroup::note_cause(const std::string& cause) noexcept {
  auto& record = segment_.record(rank());
  if (record.caused.load(std::memory_order_relaxed) != 0) return;
  store_text(record.cause, cause);
  record.caused.store(1, std::memory_order_release);
}

std::vector<std::string> SharedGroup::names_of(const std::vector<int>& ranks) const {
  std::vector<std::string> names;
  for (const int other : ranks) names.push_back(name(other));
  return names;
}

std::string SharedGroup::name(int rank) const {
  return with_process("rank " + std::to_string(names_[static_cast<size_t>(rank)]),
                      segment_.record(rank).identity.data());
}

}  // namespace lockstep::shm
