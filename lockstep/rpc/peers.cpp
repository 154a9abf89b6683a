#include "lockstep/rpc/peers.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/worker.h"

namespace lockstep::rpc::detail {
namespace {

const auto& lifeline_function() {
  static const auto registered = function(
      "lockstep.rpc.lifeline", [] { return this_worker("rpc: a lifeline")->peers().lifeline(); });
  return registered;
}

}  // namespace

void register_lifeline() {
  lifeline_function();
}

Peers::Peers(Store store, std::vector<std::string> names, int rank)
    : store_(std::move(store)),
      names_(std::move(names)),
      rank_(rank),
      shared_(std::make_shared<Shared>()) {
  shared_->states.assign(names_.size(), State::here);
}

void Peers::watch() {
  for (size_t peer = 0; peer < names_.size(); ++peer) {
    if (static_cast<int>(peer) == rank_) continue;
    const auto state = send_call({names_[peer], std::chrono::milliseconds(0)},
                                 lifeline_function().signature(), {}, CallKind::lifeline);
    state->when_done([shared = shared_, peer, state = std::weak_ptr(state)] {
      State now = State::left;
      try {
        state.lock()->value({});
      } catch (const std::exception&) {
        now = State::lost;
      }
      const std::lock_guard lock(shared->mutex);
      shared->states[peer] = now;
    });
  }
}

std::vector<std::string> Peers::lost() const {
  const std::lock_guard lock(shared_->mutex);
  std::vector<std::string> names;
  for (size_t peer = 0; peer < names_.size(); ++peer) {
    if (shared_->states[peer] == State::lost) names.push_back(names_[peer]);
  }
  return names;
}

bool Peers::expects(int rank) const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->states[static_cast<size_t>(rank)] != State::lost;
}

void Peers::throw_missing(const std::map<int, std::string>& came) const {
  std::vector<std::string> missing;
  for (int rank = 0; rank < static_cast<int>(names_.size()); ++rank) {
    if (!came.count(rank) && expects(rank)) missing.push_back(names_[static_cast<size_t>(rank)]);
  }
  throw TimeoutError("rpc: shutdown of worker '" + names_[static_cast<size_t>(rank_)] +
                         "' timed out: it waited for '" + join(missing, "', '") + "'",
                     "Options::shutdown_timeout is how long it waits");
}

std::map<int, std::string> Peers::meet(const std::string& what, const std::string& value,
                                       std::chrono::steady_clock::time_point deadline) {
  const auto key = [&](int rank) { return what + "/" + std::to_string(rank); };
  store_.set(key(rank_), value);
  std::map<int, std::string> came;
  int rank = 0;
  for (PollPause pause; rank < static_cast<int>(names_.size());) {
    if (store_.check({key(rank)})) {
      came[rank] = store_.get(key(rank));
      ++rank;
    } else if (!expects(rank)) {
      ++rank;
    } else if (std::chrono::steady_clock::now() >= deadline) {
      throw_missing(came);
    } else {
      pause.sleep();
    }
  }
  return came;
}

}  // namespace lockstep::rpc::detail
