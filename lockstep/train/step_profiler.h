#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "lockstep/comm/process_group.h"
#include "lockstep/train/step_profile.h"

namespace lockstep {

struct StepProfilerOptions {
  /// Also notes every operation of LibTorch that this thread and autograd's threads for it run.
  /// Costs some 0.5 us each, which is much for small models. So it is off.
  bool operations = false;
};

/// Notes when the parts of training steps and their communication begin and end.
///
///   StepProfiler profiler(world.group());
///   for (...) {
///     const auto step = profiler.step();
///     { const auto part = profiler.part(StepPart::forward); ... }
///   }
///   const StepProfile profile = profiler.finish();
///
/// A mark is a reading of the clock and an append, some 50 ns. A step of four parts has ten marks.
/// Collectives come from observe_calls: those of this group only. LibTorch's own profiler would
/// give the operations too. But it knows neither the parts nor the communication of a backend that
/// is foreign to it, and it costs several microseconds per mark. One thread. One profiler per group
/// at a time. `group` may be null: then there is no communication.
class StepProfiler {
 public:
  explicit StepProfiler(const ProcessGroup& group, const StepProfilerOptions& options = {});
  ~StepProfiler();
  StepProfiler(const StepProfiler&) = delete;
  StepProfiler& operator=(const StepProfiler&) = delete;

  /// Ends at its destruction. A step may end in an exception. Parts must end before it.
  class [[nodiscard]] Mark {
   public:
    Mark(Mark&& other) noexcept : profiler_(other.profiler_) { other.profiler_ = nullptr; }
    Mark& operator=(Mark&&) = delete;
    ~Mark() {
      if (profiler_) profiler_->end(is_step_);
    }

   private:
    friend class StepProfiler;
    Mark(StepProfiler* profiler, bool is_step) : profiler_(profiler), is_step_(is_step) {}
    StepProfiler* profiler_;
    bool is_step_ = false;
  };
  Mark step();
  Mark part(StepPart part);

  /// Ends the profile and gives what was noted. Waits until all collectives have ended. Throws
  /// TimeoutError when the group's time-out passes before that.
  StepProfile finish();

 private:
  class Calls;
  class Operations;
  void end(bool is_step);
  void stop() noexcept;

  ProcessGroup group_;
  std::shared_ptr<Calls> calls_;
  std::unique_ptr<Operations> operations_;
  StepProfile profile_;
};

}  // namespace lockstep
