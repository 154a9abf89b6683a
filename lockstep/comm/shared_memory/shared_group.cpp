#include "lockstep/comm/shared_memory/shared_group.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/deadline.h"
#include "lockstep/comm/shared_memory/futex.h"

namespace lockstep::shm {
namespace {

using Clock = std::chrono::steady_clock;

/// Who writes on the board and dies over it leaves it unfinished.
constexpr std::chrono::milliseconds kWriting{100};

}  // namespace

SharedGroup::SharedGroup(SharedGroupOptions options, const Meeting& meeting)
    : segment_(options.segment, meeting),
      names_(std::move(options.segment.names)),
      judge_(std::move(options.judge)) {
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
  Deadline deadline(timeout);
  auto look = Clock::now() + kSlice;
  while (!barrier.reached(step_, size())) {
    if (failed()) throw_if_failed(call.text(), members(missing(), Failure::Kind::late));
    barrier.sleep(step_, size(), kSlice);
    const bool is_late = deadline.passed();
    const auto now = Clock::now();
    if (now < look) continue;
    look = now + kSlice;
    const std::vector<int> absent = missing();
    if (absent.empty() || notice_lost(absent, step_) || !is_late) continue;
    fail(late(absent, timeout));
  }
}

// No more ranks stay within this rank's processors than there are. Sets that overlap in part are
// not added up.
bool SharedGroup::find_processor() const {
  const cpu_set_t& own = segment_.record(rank()).processors;
  int within = 0;
  for (int other = 0; other < size(); ++other) {
    const auto& record = segment_.record(other);
    if (record.state.load(std::memory_order_acquire) == RankState::absent) return false;
    cpu_set_t common;
    CPU_AND(&common, &own, &record.processors);
    if (CPU_EQUAL(&common, &record.processors)) ++within;
  }
  const auto known = static_cast<unsigned>(CPU_COUNT(&own));
  const bool has =
      static_cast<unsigned>(within) <= (known > 0 ? known : std::thread::hardware_concurrency());
  has_processor_.store(has ? Known::yes : Known::no, std::memory_order_relaxed);
  return has;
}

void SharedGroup::compare(const Call& call, std::chrono::milliseconds timeout) {
  for (int other = 0; other < size(); ++other) {
    if (header_of(other, step_).call != hash_) differ(call, timeout);
  }
}

void SharedGroup::differ(const Call& call, std::chrono::milliseconds timeout) {
  const Failure mismatch = judge_(tell_calls(call, timeout));
  throw MismatchError(mismatch.text, {}, mismatch);
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

void SharedGroup::fail(const Failure& failure) noexcept {
  auto& board = segment_.header().board;
  uint32_t expected = FailureBoard::empty;
  if (!board.state.compare_exchange_strong(expected, FailureBoard::writing)) return;
  store_failure(board.failure, failure);
  board.state.store(FailureBoard::written, std::memory_order_seq_cst);
  wake_all(segment_.header().barrier.count);
}

std::optional<Failure> SharedGroup::failure() const {
  const auto& board = segment_.header().board;
  if (board.state.load(std::memory_order_acquire) != FailureBoard::written) return std::nullopt;
  return read_failure(board.failure);
}

void SharedGroup::throw_if_failed(const std::string& what,
                                  const std::vector<Failure::Rank>& awaited) const {
  if (!failed()) return;
  auto failure = this->failure();
  for (const auto end = Clock::now() + kWriting; !failure && Clock::now() < end;) {
    spin_pause();
    failure = this->failure();
  }
  if (!failure)
    failure =
        Failure{.kind = Failure::Kind::ended, .text = "a rank ended while it told of a failure"};
  std::vector<Failure::Rank> others;
  for (const auto& rank : awaited)
    if (failure->kind == Failure::Kind::gave_up && !failure->concerns(rank.number))
      others.push_back(rank);
  const std::string me = "rank " + std::to_string(names_[static_cast<size_t>(rank())]) + ": ";
  std::string text = me + what + (failure->timed_out() ? " did not finish: " : " cannot finish: ") +
                     describe(*failure);
  for (const auto& rank : others) text += "; " + describe({.kind = failure->kind, .ranks = {rank}});
  failure->ranks.insert(failure->ranks.end(), others.begin(), others.end());
  std::rethrow_exception(failure_error(text, *failure));
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

bool SharedGroup::notice_lost(const std::vector<int>& ranks, uint64_t step) {
  Failure lost;
  for (const int other : ranks) {
    // It may have arrived and gone since: then all that it had to give is there.
    if (gone(other) && segment_.record(other).step.load(std::memory_order_acquire) < step)
      lost.add(end_of(other));
  }
  if (lost.ranks.empty()) return false;
  fail(lost);
  return true;
}

void SharedGroup::look_after(const std::vector<int>& ranks, const std::string& what) {
  notice_lost(ranks, UINT64_MAX);
  throw_if_failed(what);
}

Failure SharedGroup::late(const std::vector<int>& ranks, std::chrono::milliseconds timeout) const {
  Failure failure{.kind = Failure::Kind::stuck,
                  .calls = static_cast<int64_t>(calls_),
                  .waited_ms = timeout.count()};
  for (const int other : ranks) {
    const uint64_t calls = segment_.record(other).calls.load(std::memory_order_relaxed);
    const auto kind = calls < calls_ ? Failure::Kind::late : Failure::Kind::stuck;
    if (kind == Failure::Kind::late) failure.kind = kind;
    failure.ranks.push_back(member(other, kind));
  }
  return failure;
}

Failure SharedGroup::end_of(int rank) const {
  const auto& record = segment_.record(rank);
  const bool left = record.state.load(std::memory_order_acquire) == RankState::left;
  const auto cause = noted_cause(rank);
  Failure::Rank member = this->member(rank, left ? Failure::Kind::closed : Failure::Kind::ended);
  member.steps = record.rounds.load(std::memory_order_relaxed);
  if (left && !cause && member.steps > 0) member.kind = Failure::Kind::left;
  return {.kind = member.kind, .ranks = {member}, .cause = cause};
}

std::shared_ptr<const Failure> SharedGroup::noted_cause(int rank) const {
  const auto& record = segment_.record(rank);
  if (record.caused.load(std::memory_order_acquire) == 0) return nullptr;
  const auto cause = read_failure(record.cause);
  return cause ? std::make_shared<const Failure>(*cause) : nullptr;
}

Failure::Rank SharedGroup::member(int rank, Failure::Kind kind) const {
  const auto& record = segment_.record(rank);
  return {.number = names_[static_cast<size_t>(rank)],
          .kind = kind,
          .process = process_number(record.identity.data()),
          .calls = static_cast<int64_t>(record.calls.load(std::memory_order_relaxed))};
}

std::vector<Failure::Rank> SharedGroup::members(const std::vector<int>& ranks,
                                                Failure::Kind kind) const {
  std::vector<Failure::Rank> found;
  for (const int other : ranks) found.push_back(member(other, kind));
  return found;
}

std::string SharedGroup::name(int rank) const {
  return with_process("rank " + std::to_string(names_[static_cast<size_t>(rank)]),
                      segment_.record(rank).identity.data());
}

}  // namespace lockstep::shm
