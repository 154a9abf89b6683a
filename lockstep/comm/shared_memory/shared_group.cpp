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

constexpr std::array<char, 8> kVersion{'l', 'o', 'c', 'k', 's', 'h', 'm', 9};

size_t records_offset() {
  constexpr size_t kAlign = alignof(RankRecord);
  return (sizeof(SegmentHeader) + kAlign - 1) / kAlign * kAlign;
}
size_t slots_offset(size_t size) {
  return records_offset() + size * sizeof(RankRecord);
}
size_t messages_offset(size_t size, size_t slot_bytes) {
  return whole_pages(slots_offset(size) + size * kSlots * (kSlotHeader + slot_bytes));
}
size_t total_bytes(size_t size, size_t slot_bytes, size_t message_bytes) {
  return messages_offset(size, slot_bytes) + size * (size + 1) * message_bytes;
}

/// Where each rank has data for each other, its slot holds at least 64 bytes for every one.
size_t whole_slot(const SharedGroupOptions& options) {
  return std::max((options.slot_bytes + 63) / 64, static_cast<size_t>(options.size)) * 64;
}

const SharedGroupOptions& checked(const SharedGroupOptions& options) {
  if (options.size < 1 || options.size > 4096 || options.rank < 0 || options.rank >= options.size)
    throw UsageError("shared memory: rank " + std::to_string(options.rank) + " of " +
                     std::to_string(options.size) + "; it joins up to 4096 ranks");
  return options;
}

}  // namespace

SharedGroup::SharedGroup(const SharedGroupOptions& options, const Meeting& meeting)
    : rank_(checked(options).rank),
      size_(options.size),
      slot_bytes_(whole_slot(options)),
      message_bytes_(whole_pages(options.message_bytes)),
      memory_(options, meeting,
              total_bytes(static_cast<size_t>(size_), slot_bytes_, message_bytes_),
              messages_offset(static_cast<size_t>(size_), slot_bytes_)),
      header_(reinterpret_cast<SegmentHeader*>(memory_.data())),
      records_(reinterpret_cast<RankRecord*>(memory_.data() + records_offset())),
      slots_(memory_.data() + slots_offset(static_cast<size_t>(size_))),
      messages_(memory_.data() + messages_offset(static_cast<size_t>(size_), slot_bytes_)),
      names_(options.names),
      judge_(options.judge) {
  for (int rank = static_cast<int>(names_.size()); rank < size(); ++rank) names_.push_back(rank);
  if (rank_ == 0) header_->version = kVersion;
  if (header_->version != kVersion)
    throw CommError(
        "shared memory: rank 0 of group '" + options.group + "' is of another version of Lockstep",
        "start all ranks from the same build");
  RankRecord& mine = records_[rank_];
  const std::string identity = process_identity();
  mine.identity[identity.copy(mine.identity.data(), mine.identity.size() - 1)] = '\0';
  sched_getaffinity(0, sizeof(mine.processors), &mine.processors);
  mine.state.store(RankState::joined, std::memory_order_release);
  try {
    memory_.meet();
  } catch (const CommError& error) {
    // For ranks that have come already: this process may live on.
    note_cause(error.failure());
    leave();
    throw;
  } catch (...) {
    leave();
    throw;
  }
}

void SharedGroup::leave(int64_t rounds) noexcept {
  RankRecord& mine = records_[rank_];
  if (rounds > 0) mine.rounds.store(rounds, std::memory_order_relaxed);
  mine.state.store(RankState::left, std::memory_order_seq_cst);
}

void SharedGroup::note_cause(const Failure& cause) noexcept {
  RankRecord& mine = records_[rank_];
  if (mine.caused.load(std::memory_order_relaxed) != 0) return;
  store_failure(mine.cause, cause);
  mine.caused.store(1, std::memory_order_release);
}

void SharedGroup::begin(const Call& call) {
  if (failed()) throw_if_failed(call.text());
  hash_ = call.hash();
  header_of(rank(), step_ + 1).call = hash_;
  records_[rank_].calls.store(++calls_, std::memory_order_relaxed);
}

void SharedGroup::arrive() {
  ++step_;
  if (size() == 1) return;
  header_->barrier.arrive(step_, size());
  // Afterwards: who dies before it has arrived must not be taken for one that has, or the others
  // would find nobody missing and wait for ever.
  records_[rank_].step.store(step_, std::memory_order_release);
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
  auto& barrier = header_->barrier;
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
  const cpu_set_t& own = record(rank()).processors;
  int within = 0;
  for (int other = 0; other < size(); ++other) {
    const auto& record = records_[other];
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
  const Failure mismatch = judge_(calls);
  throw MismatchError(mismatch.text, {}, mismatch);
}

void SharedGroup::fail(const Failure& failure) noexcept {
  auto& board = header_->board;
  uint32_t expected = FailureBoard::empty;
  if (!board.state.compare_exchange_strong(expected, FailureBoard::writing)) return;
  store_failure(board.failure, failure);
  board.state.store(FailureBoard::written, std::memory_order_seq_cst);
  wake_all(header_->barrier.count);
}

std::optional<Failure> SharedGroup::failure() const {
  const auto& board = header_->board;
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
    if (record(other).step.load(std::memory_order_acquire) < step_) ranks.push_back(other);
  }
  return ranks;
}

bool SharedGroup::gone(int rank) const {
  const auto& record = records_[rank];
  const RankState state = record.state.load(std::memory_order_acquire);
  if (state == RankState::absent) return false;
  return state == RankState::left ||
         process_state(record.identity.data()) == ProcessState::ended;
}

bool SharedGroup::notice_lost(const std::vector<int>& ranks, uint64_t step) {
  Failure lost;
  for (const int other : ranks) {
    // It may have arrived and gone since: then all that it had to give is there.
    if (gone(other) && record(other).step.load(std::memory_order_acquire) < step)
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
    const uint64_t calls = record(other).calls.load(std::memory_order_relaxed);
    const auto kind = calls < calls_ ? Failure::Kind::late : Failure::Kind::stuck;
    if (kind == Failure::Kind::late) failure.kind = kind;
    failure.ranks.push_back(member(other, kind));
  }
  return failure;
}

Failure SharedGroup::end_of(int rank) const {
  const auto& record = records_[rank];
  const bool left = record.state.load(std::memory_order_acquire) == RankState::left;
  const auto cause = noted_cause(rank);
  Failure::Rank member = this->member(rank, left ? Failure::Kind::closed : Failure::Kind::ended);
  member.steps = record.rounds.load(std::memory_order_relaxed);
  if (left && !cause && member.steps > 0) member.kind = Failure::Kind::left;
  return {.kind = member.kind, .ranks = {member}, .cause = cause};
}

std::shared_ptr<const Failure> SharedGroup::noted_cause(int rank) const {
  const auto& record = records_[rank];
  if (record.caused.load(std::memory_order_acquire) == 0) return nullptr;
  const auto cause = read_failure(record.cause);
  return cause ? std::make_shared<const Failure>(*cause) : nullptr;
}

Failure::Rank SharedGroup::member(int rank, Failure::Kind kind) const {
  const auto& record = records_[rank];
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
                      record(rank).identity.data());
}

}  // namespace lockstep::shm
