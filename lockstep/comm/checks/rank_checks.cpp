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

// The number under "state": passed comparisons in the low 40 bits, mismatches among them above.
constexpr int64_t kMismatch = int64_t{1} << 40;
int64_t passed(int64_t state) {
  return state & (kMismatch - 1);
}
int64_t mismatches(int64_t state) {
  return state >> 40;
}

/// With the calls of all ranks.
constexpr size_t kLongestMismatch = 1 << 20;
constexpr std::chrono::milliseconds kLookForMembers{50};

constexpr const char* kModeKey = "mode";
constexpr const char* kStateKey = "state";
constexpr const char* kArrivedKey = "arrived";

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
  if (failed_) std::rethrow_exception(failed_);
  try {
    meet(call, timeout);
  } catch (const MismatchError&) {
    throw;
  } catch (const CommError& e) {
    failed_ = std::current_exception();
    context_.tell_failed("the comparison of calls: " + std::string(e.what()));
    throw;
  } catch (const std::exception& e) {
    if (!is_store_lost(e)) throw;
    failed_ = context_.store_lost("the comparison of " + describe(call, context_.names()) +
                                  ", collective " + std::to_string(call.sequence) + " of group '" +
                                  context_.group() + "',");
    std::rethrow_exception(failed_);
  }
}

void RankChecks::meet(const CallSignature& mine, std::chrono::milliseconds timeout) {
  auto& store = context_.store();
  store.set(call_key(context_.rank()), encode(mine));
  ++compared_;
  if (store.add(kArrivedKey, 1) == compared_ * context_.size()) {
    judge(mine);
  } else {
    await(mine, timeout);
  }
}

void RankChecks::judge(const CallSignature& mine) {
  auto& store = context_.store();
  std::vector<CallSignature> calls;
  for (int rank = 0; rank < context_.size(); ++rank)
    calls.push_back(rank == context_.rank() ? mine : decode(store.get_to_str(call_key(rank))));
  const auto mismatch = find_mismatch(calls, context_.names(), context_.group());
  if (!mismatch) return void(store.add(kStateKey, 1));
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
    const bool late = Clock::now() >= deadline, looks = look.due() || late;
    // Before the state: who has passed this comparison may leave.
    const std::vector<int> gone = looks ? context_.gone() : std::vector<int>();
    const auto seen = looks ? context_.seen_failure() : std::nullopt;
    const int64_t state = context_.read_number(kStateKey);
    if (passed(state) >= compared_) {
      if (mismatches(state) == mismatches_) return;
      ++mismatches_;
      std::rethrow_exception(
          mismatch_error(decode_failure(store.get_to_str(mismatch_key(compared_))).value()));
    }
    if (!gone.empty()) throw_failure(called(mine) + ", but ", context_.end_of(gone));
    if (seen) throw_failure(called(mine) + ", but the group has failed: ", *seen);
    if (!late) continue;
    const Failure missing = who_is_missing(mine);
    throw_failure(called(mine) + " and waited " + seconds_text(timeout) + ": ", missing);
  }
}

/// At its time-out.
Failure RankChecks::who_is_missing(const CallSignature& mine) {
  auto& store = context_.store();
  Failure late{.kind = Failure::Kind::late};
  std::vector<std::string> parts;
  for (int rank : context_.others()) {
    std::string last = "it has called no collective yet";
    if (store.check({call_key(rank)})) {
      const CallSignature call = decode(store.get_to_str(call_key(rank)));
      if (call.sequence >= mine.sequence) continue;
      last = "its last was " + describe(call, context_.names()) + ", collective " +
             std::to_string(call.sequence);
    }
    late.ranks.push_back(context_.member(rank, late.kind));
    parts.push_back(rank_list({rank}, context_.names()) + " did not come (" + last + ")");
  }
  // Between telling its call and counting itself, or as the last that is to compare them all.
  if (parts.empty())
    parts.push_back(rank_list(context_.others(), context_.names()) +
                    " told the same, but one of them does not go on");
  late.text = join(parts, "; ");
  return late;
}

}  // namespace lockstep
