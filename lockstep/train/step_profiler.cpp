#include "lockstep/train/step_profiler.h"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

int64_t now() {
  return nanoseconds(Clock::now());
}

}  // namespace

class StepProfiler::Calls final : public CallObserver {
 public:
  void call_begins() noexcept override {
    const std::lock_guard lock(mutex_);
    ++under_way_;
  }

  void call_ended(const ObservedCall& call, bool failed) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!failed) ended_.push_back(call);
    if (--under_way_ == 0) none_under_way_.notify_all();
  }

  std::vector<CallSpan> take(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!none_under_way_.wait_for(lock, timeout, [this] { return under_way_ == 0; })) {
      throw TimeoutError("a profile ends while " + std::to_string(under_way_) +
                         " collectives of the profiled steps are still under way");
    }
    std::vector<CallSpan> spans;
    for (const ObservedCall& call : std::exchange(ended_, {})) {
      spans.push_back({std::string(operation_name(call.operation)),
                       call.bytes,
                       {nanoseconds(call.begin), nanoseconds(call.end)},
                       nanoseconds(call.returned)});
    }
    return spans;
  }

 private:
  std::mutex mutex_;
  std::condition_variable none_under_way_;
  int under_way_ = 0;
  std::vector<ObservedCall> ended_;
};

/// Notes the operations that this thread, and autograd's threads for it, begin while it lives, by
/// LibTorch's RecordFunction callbacks. To be destroyed on the thread that made it.
class StepProfiler::Operations {
 public:
  Operations()
      : notes_(std::make_shared<Notes>()),
        visible_(kPlace, notes_),
        handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&Operations::begin, &Operations::end)
                .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}))) {
    notes_->thread_of(std::this_thread::get_id());
  }
  ~Operations() { at::removeCallback(handle_); }

  std::vector<OperationSpan> take() {
    const std::lock_guard lock(notes_->mutex);
    return std::exchange(notes_->spans, {});
  }

 private:
  /// The callbacks are plain functions without an argument of their own. This is how LibTorch hands
  /// them their state, also on autograd's threads.
  struct Notes : c10::DebugInfoBase {
    std::mutex mutex;
    std::vector<OperationSpan> spans;
    std::map<std::thread::id, int> threads;
    int thread_of(std::thread::id id) {
      return threads.try_emplace(id, static_cast<int>(threads.size())).first->second;
    }
  };
  struct Begun : at::ObserverContext {
    int64_t time = 0;
  };
  /// One of the places that all LibTorch's versions have and that neither they nor their profiler
  /// use.
  inline static const c10::DebugInfoKind kPlace = c10::DebugInfoKind::TEST_INFO_2;

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction&) {
    auto begun = std::make_unique<Begun>();
    begun->time = now();
    return begun;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    const int64_t time = now();
    auto* notes = static_cast<Notes*>(c10::ThreadLocalDebugInfo::get(kPlace));
    if (!context || !notes) return;
    const std::lock_guard lock(notes->mutex);
    const int thread = notes->thread_of(std::this_thread::get_id());
    notes->spans.push_back({function.name(), thread, {static_cast<Begun*>(context)->time, time}});
  }

  std::shared_ptr<Notes> notes_;
  c10::DebugInfoGuard visible_;
  at::CallbackHandle handle_;
};

StepProfiler::StepProfiler(const ProcessGroup& group, const StepProfilerOptions& options)
    : group_(group) {
  if (group_) {
    profile_.rank = group_.rank();
    calls_ = std::make_shared<Calls>();
    observe_calls(group_, calls_);
  }
  if (options.operations) operations_ = std::make_unique<Operations>();
}

StepProfiler::~StepProfiler() {
  stop();
}

void StepProfiler::stop() noexcept {
  operations_.reset();
  if (!calls_) return;
  try {
    observe_calls(group_, nullptr);
  } catch (const std::exception& error) {
    log_debug(std::string("the end of a profile: ") + error.what());  // The group is closed.
  }
  calls_.reset();
}

StepProfiler::Mark StepProfiler::step() {
  profile_.steps.push_back({now(), 0});
  return {this, /*is_step=*/true};
}

StepProfiler::Mark StepProfiler::part(StepPart part) {
  profile_.parts.push_back({part, {now(), 0}});
  return {this, /*is_step=*/false};
}

void StepProfiler::end(bool is_step) {
  (is_step ? profile_.steps.back() : profile_.parts.back().time).end = now();
}

StepProfile StepProfiler::finish() {
  if (calls_) profile_.calls = calls_->take(group_.timeout());
  if (operations_) profile_.operations = operations_->take();
  stop();
  return std::exchange(profile_, {});
}

}  // namespace lockstep
