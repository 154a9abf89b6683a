#pragma once

#include <nlohmann/json_fwd.hpp>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

/// What a training step does, one after the other, on the thread that trains.
enum class StepPart : uint8_t { data, forward, backward, optimizer };
inline constexpr size_t kStepParts = 4;
/// "data", "forward", ...
const char* step_part_name(StepPart part);

/// Nanoseconds of the steady clock, which the processes of one host share.
struct TimeSpan {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t length() const { return end - begin; }
};

struct PartSpan {
  StepPart part = StepPart::data;
  TimeSpan time;
};

/// A collective; see ObservedCall.
struct CallSpan {
  std::string name;
  int64_t bytes = 0;
  TimeSpan time;
  int64_t returned = 0;  ///< When the call returned to the caller.
};

/// One of LibTorch's operations. Those that it calls lie within it.
struct OperationSpan {
  std::string name;
  int thread = 0;  ///< 0: the thread that trains; others in the order in which they came.
  TimeSpan time;
};

/// What one rank did in some steps. Steps and parts are in the order of time and do not overlap.
/// Parts lie within steps.
struct StepProfile {
  int rank = 0;
  std::vector<TimeSpan> steps;
  std::vector<PartSpan> parts;
  std::vector<CallSpan> calls;
  std::vector<OperationSpan> operations;
};

/// Where a step's time went, in microseconds. `parts`, `exposed` and `rest` add up to `step`.
struct StepBreakdown {
  std::array<double, kStepParts> parts{};  ///< Without the waits for communication in them.
  double exposed = 0;  ///< Communication for which the thread that trains waited.
  double rest = 0;     ///< What lies in no part.
  double step = 0;
  double hidden = 0;  ///< Communication that ran while that thread did something else.
};

/// What of a profile's communication was exposed: the spans in which the thread that trains waited,
/// in order, and each step's breakdown.
///
/// A part waits for the collectives that began in it. It waits in each from its begin until the
/// call came back. Once the last of them has come back, it waits until all of them have ended.
/// Between those waits it computes. (DistributedDataParallel calls the last all-reduce when the
/// last gradient is there. Then backward has nothing left but to wait.) A collective that began in
/// no part is waited for.
struct ProfileAnalysis {
  std::vector<StepBreakdown> steps;
  std::vector<TimeSpan> waits;
};
ProfileAnalysis analyse(const StepProfile& profile);

/// The mean of the middle half of the steps by their whole time. It is as steady as a median, and
/// its parts add up as each step's do. Throws UsageError for no steps.
StepBreakdown typical_step(std::vector<StepBreakdown> steps);

/// An operation and how much of a step's time it takes in all places where it is called.
struct OperationCost {
  std::string name;
  double calls = 0;    ///< Per step.
  double self_us = 0;  ///< Per step, without the operations that it calls.
};
/// The costliest first.
std::vector<OperationCost> operation_costs(const StepProfile& profile);

/// The profiles of all ranks of one host in the format of Chrome's about:tracing, which Perfetto
/// reads too. There is one process per rank, with these rows:
/// - one for the thread that trains: steps, in them parts, and in those "wait for communication",
/// - as many for communication as collectives ran at the same time,
/// - one per thread for operations.
///
/// `metadata` is an object and becomes `otherData`. Times are microseconds from the first step's
/// begin.
nlohmann::ordered_json chrome_trace(const std::vector<StepProfile>& ranks,
                                    const nlohmann::ordered_json& metadata);

/// For sending a profile to another rank.
nlohmann::json to_object(const StepProfile& profile);
StepProfile profile_from(const nlohmann::json& object);

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
/// A mark reads the clock and appends to a vector, which takes some 50 ns. A step of four parts has
/// ten marks. Collectives come from observe_calls: those of this group only. LibTorch's own
/// profiler does not know the parts, nor the communication of backends other than its own, and
/// costs several microseconds per mark. Use it from one thread. One profiler per group at a time.
/// `group` may be null: then there is no communication.
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
