#pragma once

// For tests: what LibTorch's traces would show, of all threads.

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <vector>

namespace lockstep::test {

/// An event of a backend's, as "shm:all_reduce".
struct WatchedCall {
  std::string name;
  std::vector<std::vector<int64_t>> shapes;
  bool ended = false;
};

/// Elements that a rank gives and gets.
struct WatchedSizes {
  std::string name;
  int64_t given, taken;
  bool operator==(const WatchedSizes&) const = default;
};

/// Watches while it lives; one at a time.
class WatchedCalls {
 public:
  explicit WatchedCalls(std::string backend) : prefix_(std::move(backend) + ":") {
    current() = this;
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(begin, end)
            .needsInputs(true)
            .scopes({at::RecordScope::USER_SCOPE, at::RecordScope::FUNCTION}));
  }
  ~WatchedCalls() {
    at::removeCallback(handle_);
    current() = nullptr;
  }

  /// Those that have begun so far, sorted by name.
  std::vector<WatchedCall> seen() const {
    const std::lock_guard lock(mutex_);
    auto calls = calls_;
    std::stable_sort(calls.begin(), calls.end(),
                     [](const auto& a, const auto& b) { return a.name < b.name; });
    return calls;
  }
  /// What kineto would write as the sizes of calls, in the order in which they began.
  std::vector<WatchedSizes> sizes() const {
    const std::lock_guard lock(mutex_);
    return sizes_;
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    calls_.clear();
    sizes_.clear();
  }

 private:
  struct Index : at::ObserverContext {
    explicit Index(size_t index) : index(index) {}
    size_t index;
  };
  static WatchedCalls*& current() {
    static WatchedCalls* watched = nullptr;
    return watched;
  }
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    auto& self = *current();
    const std::string name = function.name();
    if (name == at::kParamCommsCallName) self.keep_sizes();
    if (name.rfind(self.prefix_, 0) != 0) return nullptr;
    WatchedCall call{name, {}};
    for (const auto& input : function.inputs())
      if (input.isTensor()) call.shapes.push_back(input.toTensor().sizes().vec());
    const std::lock_guard lock(self.mutex_);
    self.calls_.push_back(std::move(call));
    return std::make_unique<Index>(self.calls_.size() - 1);
  }
  static void end(const at::RecordFunction&, at::ObserverContext* context) {
    if (!context) return;
    const std::lock_guard lock(current()->mutex_);
    current()->calls_[static_cast<Index*>(context)->index].ended = true;
  }

  void keep_sizes() {
    const auto* info = dynamic_cast<const torch::ParamCommsDebugInfo*>(
        c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PARAM_COMMS_INFO));
    const std::lock_guard lock(mutex_);
    if (info)
      sizes_.push_back(
          {info->getCollectiveName(), info->getInMessageNelems(), info->getOutMessageNelems()});
  }

  const std::string prefix_;
  at::CallbackHandle handle_ = 0;
  mutable std::mutex mutex_;
  std::vector<WatchedCall> calls_;
  std::vector<WatchedSizes> sizes_;
};

}  // namespace lockstep::test
