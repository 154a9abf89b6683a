#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace lockstep {
class CheckContext;
}

namespace lockstep::hierarchical {

/// Asks the store on a thread of its own, which starts with the first question. A request to a
/// store whose host was cut off from the network blocks for as long as the system's TCP tries.
/// Nothing else may wait for that. Such a thread is left to the end of the process. Any other is
/// joined. Any thread may call.
class StoreRequests {
 public:
  explicit StoreRequests(std::shared_ptr<CheckContext> context)
      : state_(std::make_shared<State>()), context_(std::move(context)) {}
  ~StoreRequests();

  /// The answer. None when it does not come within `patience`, or the question throws. The question
  /// may be asked later all the same, so it must own what it uses.
  template <class Answer>
  std::optional<Answer> ask(std::function<Answer(CheckContext&)> question,
                            std::chrono::milliseconds patience) noexcept {
    try {
      auto task = std::make_shared<std::packaged_task<Answer()>>(
          [context = context_, question = std::move(question)] { return question(*context); });
      auto answer = task->get_future();
      post([task] { (*task)(); });
      if (answer.wait_for(patience) == std::future_status::ready) return answer.get();
    } catch (const std::exception&) {
    }
    return std::nullopt;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> questions;
    bool stop = false;
    bool ended = false;
  };
  void post(std::function<void()> question);
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
  const std::shared_ptr<CheckContext> context_;
  std::thread thread_;
};

}  // namespace lockstep::hierarchical
