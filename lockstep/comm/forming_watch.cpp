#include "lockstep/comm/forming_watch.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/group_impl.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// A rank's process, as it told when the default group formed; empty where it told nothing.
std::string identity_of(Store store, int rank) {
  const std::string key =
      check_part(kDefaultGroup) + "/" + check_prefix(kDefaultGroup) + "/" + announcement_key(rank);
  return store.check({key}) ? store.get(key) : std::string();
}

class WatchedStore final : public c10d::PrefixStore {
 public:
  WatchedStore(const std::string& prefix, const c10::intrusive_ptr<c10d::Store>& store,
               std::shared_ptr<FormingWatch> watch)
      : PrefixStore(prefix, store), watch_(watch) {}

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto watch = watch_.lock();
    if (!watch) return PrefixStore::wait(keys, timeout);
    Arrival arrival(keys);
    const auto here = [this](const std::vector<std::string>& asked) { return check(asked); };
    if (watch->await(
            arrival, here, [&] { return watch->others(); }, timeout))
      return;
    C10_THROW_ERROR(DistStoreError, "wait timeout after " + std::to_string(timeout.count()) +
                                        "ms, keys: " + join(keys, ", "));
  }

 private:
  const std::weak_ptr<FormingWatch> watch_;  ///< Gone once the group has formed.
};

}  // namespace

std::string check_part(const std::string& group) {
  return "check/" + group;
}

std::string forming(const GroupContext& context, const std::string& group, size_t ranks) {
  return "rank " + std::to_string(context.rank) + ": forming the group '" + group + "' of " +
         std::to_string(ranks) + " ranks failed";
}

Failure cancelled_generation() {
  return {.kind = Failure::Kind::gave_up, .text = "a later generation has begun"};
}

FormingWatch::FormingWatch(std::shared_ptr<GroupContext> context, std::string group,
                           std::vector<int> global_ranks, Phase phase)
    : context_(std::move(context)),
      store_(context_->own_store),
      group_(std::move(group)),
      ranks_(std::move(global_ranks)),
      phase_(phase),
      identities_(ranks_.size()) {}

bool FormingWatch::await(Arrival& keys,
                         const std::function<bool(const std::vector<std::string>&)>& check,
                         const std::function<std::vector<int>()>& absent, milliseconds timeout) {
  // All ranks ask one store: many of them look less often.
  constexpr size_t kFew = 32;
  const auto deadline = Clock::now() + std::max(timeout, context_->timeout);
  Every look(milliseconds(ranks_.size() <= kFew ? 50 : 500));
  for (PollPause pause(milliseconds(20)); !keys.complete(check); pause.sleep()) {
    // One may have come before it ended.
    if (look.due() && lost(absent()) && !keys.complete(check)) throw_if_lost(absent());
    if (Clock::now() >= deadline) return false;
  }
  return true;
}

std::vector<int> FormingWatch::others() const {
  std::vector<int> others;
  for (size_t i = 0; i < ranks_.size(); ++i)
    if (ranks_[i] != context_->rank) others.push_back(static_cast<int>(i));
  return others;
}

// The others may go on without a member that has all it needs and leaves.
bool FormingWatch::may_be_missed(int global_rank) {
  return phase_ == Phase::connecting && store_.check({leave_key(global_rank)});
}

std::optional<Failure> FormingWatch::lost(const std::vector<int>& missing) {
  const std::string key = "group/" + group_ + "/lost";
  if (store_.check({key}))
    return decode_failure(store_.get(key))
        .value_or(Failure{.kind = Failure::Kind::unreachable, .text = "a member was lost"});
  std::optional<Failure> found;
  if (context_->cancelled && context_->cancelled()) found = cancelled_generation();
  for (const int member : missing) {
    std::string& identity = identities_[static_cast<size_t>(member)];
    Failure::Rank rank{.number = ranks_[static_cast<size_t>(member)], .kind = Failure::Kind::ended};
    if (identity.empty()) identity = identity_of(store_, rank.number);
    rank.process = process_number(identity);
    if (process_state(identity) == ProcessState::ended && !may_be_missed(rank.number))
      found = Failure{.kind = rank.kind, .ranks = {rank}};
  }
  if (found) store_.set(key, encode(*found));
  return found;
}

void FormingWatch::throw_if_cancelled() const {
  if (!context_->cancelled || !context_->cancelled()) return;
  const Failure failure = cancelled_generation();
  throw PeerLostError(describe(failure), {}, failure);
}

void FormingWatch::throw_if_lost(const std::vector<int>& missing) {
  found_ = lost(missing);
  throw_if_found();
}

void FormingWatch::throw_if_found() const {
  if (!found_) return;
  throw PeerLostError(forming(*context_, group_, ranks_.size()) + ": " + describe(*found_),
                      kPeerLostHint, *found_);
}

c10::intrusive_ptr<c10d::Store> watched_store(const std::string& prefix,
                                              const c10::intrusive_ptr<c10d::Store>& store,
                                              const std::shared_ptr<FormingWatch>& watch) {
  return c10::make_intrusive<WatchedStore>(prefix, store, watch);
}

}  // namespace lockstep
