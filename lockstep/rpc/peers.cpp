#include "lockstep/rpc/peers.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/rpc_worker.h"

namespace lockstep::rpc::detail {
namespace {

/// This worker waited for those in vain.
[[noreturn]] void throw_missing(const std::string& phase, const std::vector<std::string>& missing) {
  throw TimeoutError("rpc: " + phase + " of worker '" + this_worker("rpc")->name() +
                         "' timed out: it waited for '" + lockstep::join(missing, "', '") + "'",
                     "Options::timeout, but at least a minute, limits the start, and "
                     "Options::shutdown_timeout the shutdown");
}

const auto liveness_function = function("lockstep.rpc.liveness", [] {
  return this_worker("rpc: a liveness call")->peers().liveness();
});

}  // namespace

Peers::Peers(Store store, std::vector<std::string> names, int id, OnLoss on_loss)
    : store_(std::move(store)),
      names_(std::move(names)),
      id_(id),
      shared_(std::make_shared<Shared>()) {
  shared_->on_loss = std::move(on_loss);
}

void Peers::watch(int id, const std::string& name) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->peers[id] = {name, State::here};
  }
  const auto state = send_call_to(id, liveness_function.signature(), {});
  state->when_done([shared = shared_, id, state = std::weak_ptr(state)] {
    State now = State::left;
    try {
      state.lock()->value({});
    } catch (const std::exception&) {
      now = State::lost;
    }
    {
      const std::lock_guard lock(shared->mutex);
      shared->peers[id].state = now;
    }
    shared->on_loss(id);  // What it held is free, however it went.
  });
}

std::vector<std::string> Peers::names() const {
  std::vector<std::string> all = names_;
  for (const auto& name : joined_here()) {
    if (std::find(all.begin(), all.end(), name) == all.end()) all.push_back(name);
  }
  return all;
}

std::vector<std::string> Peers::joined_here() const {
  std::vector<std::string> names;
  const std::lock_guard lock(shared_->mutex);
  for (const auto& [id, peer] : shared_->peers) {
    if (id >= static_cast<int>(names_.size()) && peer.state == State::here) {
      names.push_back(peer.name);
    }
  }
  return names;
}

std::vector<std::string> Peers::lost() const {
  const std::lock_guard lock(shared_->mutex);
  std::vector<std::string> names;
  for (const auto& [id, peer] : shared_->peers) {
    const auto same = std::find(names.begin(), names.end(), peer.name);
    if (peer.state == State::lost) {
      if (same == names.end()) names.push_back(peer.name);
    } else if (same != names.end()) {
      names.erase(same);
    }
  }
  return names;
}

bool Peers::expects(int rank) const {
  const std::lock_guard lock(shared_->mutex);
  const auto found = shared_->peers.find(rank);
  return found == shared_->peers.end() || found->second.state != State::lost;
}

std::map<int, std::string> Peers::meet(const std::string& what, const std::string& value,
                                       std::chrono::steady_clock::time_point deadline,
                                       const std::string& phase) {
  const auto key = [&](int rank) { return what + "/" + std::to_string(rank); };
  store_.set(key(id_), value);
  std::map<int, std::string> came;
  int rank = 0;
  for (PollPause pause; rank < static_cast<int>(names_.size());) {
    if (store_.check({key(rank)})) {
      came[rank] = store_.get(key(rank));
      ++rank;
    } else if (!expects(rank)) {
      ++rank;
    } else if (std::chrono::steady_clock::now() >= deadline) {
      std::vector<std::string> missing;
      for (int other = 0; other < static_cast<int>(names_.size()); ++other) {
        if (!came.count(other) && expects(other)) {
          missing.push_back(names_[static_cast<size_t>(other)]);
        }
      }
      throw_missing(phase, missing);
    } else {
      pause.sleep();
    }
  }
  return came;
}

void Peers::wait_for_joined(std::chrono::steady_clock::time_point deadline) const {
  for (PollPause pause;; pause.sleep()) {
    const auto here = joined_here();
    if (here.empty()) return;
    if (std::chrono::steady_clock::now() >= deadline) throw_missing("shutdown", here);
  }
}

}  // namespace lockstep::rpc::detail
