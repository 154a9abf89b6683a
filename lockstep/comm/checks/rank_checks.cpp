#include "lockstep/comm/checks/rank_checks.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// The number under "state": passed comparisons in the low 40 bits, mismatches among them above, and
// one bit for a group in which a rank gave up.
constexpr int64_t kMismatch = int64_t{1} << 40;
constexpr int64_t kBroken = int64_t{1} << 62;
int64_t passed(int64_t state) {
  return state & (kMismatch - 1);
}
int64_t mismatches(int64_t state) {
  return (state & (kBroken - 1)) >> 40;
}

/// With the calls of all ranks.
constexpr size_t kLongestMismatch = 1 << 20;
constexpr std::chrono::milliseconds kLookForMembers{50};

constexpr const char* kModeKey = "mode";
constexpr const char* kStateKey = "state";
constexpr const char* kArrivedKey = "arrived";
constexpr const char* kBrokenKey = "broken";

std::string call_key(int rank) {
  return "call/" + std::to_string(rank);
}
std::string mismatch_key(int64_t comparison) {
  return "mismatch/" + std::to_string(comparison);
}

}  // namespace

void RankChecks::switch_off(c10d::Store& store, const std::string& prefix) {
  store.compareSet(prefix + kModeKey, "", "0");
}

bool RankChecks::decide() {
  std::lock_guard lock(mutex_);
  if (decided_) return true;
  try {
    limit_ = context_.size() == 1 ? 0 : agree();
  } catch (const std::exception& e) {
    if (!is_store_lost(e)) throw;
    std::rethrow_exception(
        context_.store_lost("the first call of group '" + context_.group() + "'"));
  }
  decided_ = true;
  return true;
}

uint64_t RankChecks::agree() {
  const bool all = context_.all_announced();
  const std::string mine = std::to_string(all ? limit_.load() : 0);
  const std::string agreed = context_.store().compareSet(kModeKey, "", mine);
  if (agreed != "0") {
    context_.remember_identities();
    return std::strtoull(agreed.c_str(), nullptr, 10);
  }
  log_debug("group '" + context_.group() +
            "' compares no calls: one of its ranks did not announce itself (a Python process?), or "
            "is told not to");
  return 0;
}

std::string RankChecks::called(const CallSignature& call) const {
  return lockstep::called({context_.rank()}, call, context_.names(), context_.group());
}

void RankChecks::compare(const CallSignature& call, std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  try {
    auto& store = context_.store();
    store.set(call_key(context_.rank()), encode(call));
    ++compared_;
    const int64_t arrived = store.add(kArrivedKey, 1);
    if (arrived == compared_ * context_.size()) {
      throw_if_broken(judge(call));
    } else {
      await(call, timeout);
    }
  } catch (const MismatchError&) {
    throw;
  } catch (const CommError& e) {
    context_.tell_failed("the comparison of calls: " + std::string(e.what()), /*known=*/true);
    throw;
  } catch (const std::exception& e) {
    if (!is_store_lost(e)) throw;
    std::rethrow_exception(context_.store_lost(
        "the comparison of " + describe(call, context_.names()) + ", collective " +
        std::to_string(call.sequence) + " of group '" + context_.group() + "',"));
  }
}

int64_t RankChecks::judge(const CallSignature& mine) {
  auto& store = context_.store();
  std::vector<CallSignature> calls;
  for (int rank = 0; rank < context_.size(); ++rank)
    calls.push_back(rank == context_.rank() ? mine : decode(store.get_to_str(call_key(rank))));
  const auto mismatch = find_mismatch(calls, context_.names(), context_.group());
  if (!mismatch) return store.add(kStateKey, 1);
  store.set(mismatch_key(compared_), encode(*mismatch, kLongestMismatch));
  store.add(kStateKey, 1 + kMismatch);
  ++mismatches_;
  std::rethrow_exception(mismatch_error(*mismatch));
}

void RankChecks::await(const CallSignature& mine, std::chrono::milliseconds timeout) {
  auto& store = context_.store();
  const auto deadline = Clock::now() + timeout;
  Every look(kLookForMembers);
  for (PollPause pause;; pause.sleep()) {
    const int64_t state = context_.read_number(kStateKey);
    if (passed(state) >= compared_) {
      if (mismatches(state) == mismatches_) return;
      ++mismatches_;
      std::rethrow_exception(
          mismatch_error(decode_failure(store.get_to_str(mismatch_key(compared_))).value()));
    }
    throw_if_broken(state);
    const bool late = Clock::now() >= deadline;
    if (!late && !look.due()) continue;
    const auto ended = context_.ended(context_.others());
    if (const auto failure = context_.seen_failure(); failure && ended.empty())
      throw_failure(called(mine) + ", but the group has failed: ", *failure);
    if (late || !ended.empty()) give_up(mine, timeout, ended);
  }
}

void RankChecks::throw_if_broken(int64_t state) {
  if ((state & kBroken) == 0) return;
  const auto failure = decode_failure(context_.store().get_to_str(kBrokenKey));
  throw_failure("group '" + context_.group() + "' has failed: ", failure.value_or(Failure()));
}

std::string RankChecks::who_is_missing(const CallSignature& mine, Failure& late) {
  auto& store = context_.store();
  std::vector<std::string> parts;
  for (int rank : context_.others()) {
    const std::string name = rank_list({rank}, context_.names());
    if (!store.check({call_key(rank)})) {
      late.ranks.push_back(context_.member(rank, late.kind));
      parts.push_back(name + " did not come (it has called no collective yet)");
      continue;
    }
    const CallSignature last = decode(store.get_to_str(call_key(rank)));
    if (last.sequence >= mine.sequence) continue;
    late.ranks.push_back(context_.member(rank, late.kind));
    parts.push_back(name + " did not come (its last was " + describe(last, context_.names()) +
                    ", collective " + std::to_string(last.sequence) + ")");
  }
  return join(parts, "; ");
}

void RankChecks::give_up(const CallSignature& mine, std::chrono::milliseconds timeout,
                         const std::vector<int>& ended) {
  Failure absent{.kind = Failure::Kind::late};
  const std::string missing = who_is_missing(mine, absent);
  if (!ended.empty()) {
    const Failure failure = context_.end_of(ended);
    break_group(failure, called(mine) + ", but " + describe(failure) +
                             (missing.empty() ? missing : ": " + missing));
  }
  // Between telling its call and counting itself, or as the last that is to compare them all.
  const std::string stuck = rank_list(context_.others(), context_.names()) +
                            " told the same, but one of them does not go on";
  const std::string text = called(mine) + " and waited " + seconds_text(timeout) + ": " +
                           (missing.empty() ? stuck : missing);
  break_group(absent, text);
}

void RankChecks::tell_end(Failure how) noexcept {
  if (context_.size() == 1 || limit_ == 0 || !decided_) return;
  // Held by a call of this rank's own that waits: then there is something to tell.
  if (std::unique_lock lock(mutex_, std::try_to_lock); lock) {
    if (static_cast<uint64_t>(compared_) >= limit_) return;
  }
  try {
    // A rank that closes because it failed passes on what it found; the others want the first
    // cause.
    if (const std::string failed = context_.told(); !failed.empty())
      how = {.kind = Failure::Kind::gave_up, .text = context_.me() + " failed in " + failed};
    break_group(how);
  } catch (const std::exception&) {  // The store is lost, which is told by whoever asks it.
  }
}

void RankChecks::break_group(const Failure& failure, const std::string& text) {
  Failure told = failure;
  told.text = text;
  break_group(told);
  std::rethrow_exception(failure_error(text, told));
}

void RankChecks::break_group(const Failure& failure) {
  auto& store = context_.store();
  const std::string mine = encode(failure);
  if (store.compareSet(kBrokenKey, "", mine) == mine) store.add(kStateKey, kBroken);
}

}  // namespace lockstep
