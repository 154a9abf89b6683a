#include "lockstep/comm/backends/hierarchical/store_requests.h"

namespace lockstep::hierarchical {
namespace {

/// What is asked at the end has this long to be answered.
constexpr std::chrono::milliseconds kLongestEnd{1'000};

}  // namespace

StoreRequests::~StoreRequests() {
  if (!thread_.joinable()) return;
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, kLongestEnd, [this] { return state_->ended; });
  lock.unlock();
  ended ? thread_.join() : thread_.detach();
}

void StoreRequests::post(std::function<void()> question) {
  const std::lock_guard lock(state_->mutex);
  state_->questions.push_back(std::move(question));
  if (!thread_.joinable()) thread_ = std::thread([state = state_] { run(state); });
  state_->changed.notify_all();
}

void StoreRequests::run(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return state->stop || !state->questions.empty(); });
    if (state->questions.empty()) break;
    const auto question = std::move(state->questions.front());
    state->questions.pop_front();
    lock.unlock();
    question();
    lock.lock();
  }
  state->ended = true;
  state->changed.notify_all();
}

}  // namespace lockstep::hierarchical
