#include <cmath>
#include <numbers>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/optim/optim.h"

namespace lockstep {
namespace {

/// How much of the way from the end of the warm-up to `total_steps` lies behind; at most 1.
double progress(const ScheduleOptions& o, int64_t step) {
  if (o.total_steps <= o.warmup_steps) {
    throw UsageError("schedule " + o.name + ": total_steps is " + std::to_string(o.total_steps) +
                     ", it must be above warmup_steps (" + std::to_string(o.warmup_steps) + ")");
  }
  if (step >= o.total_steps) return 1;
  return static_cast<double>(step - o.warmup_steps) /
         static_cast<double>(o.total_steps - o.warmup_steps);
}

double main_part(const ScheduleOptions& o, double base, int64_t step) {
  if (o.name == "constant") return base;
  if (o.name == "step") {
    if (o.step_size <= 0) {
      throw UsageError("schedule step: step_size is " + std::to_string(o.step_size) +
                       ", it must be 1 or more");
    }
    const int64_t drops = (step - o.warmup_steps) / o.step_size;
    return base * std::pow(o.gamma, static_cast<double>(drops));
  }
  if (o.name == "cosine") {
    return o.min_lr + (base - o.min_lr) * (1 + std::cos(std::numbers::pi * progress(o, step))) / 2;
  }
  if (o.name == "linear") return base + (o.min_lr - base) * progress(o, step);
  throw UsageError(unknown_word("schedule", o.name, schedule_names()));
}

}  // namespace

std::vector<std::string> schedule_names() {
  return {"constant", "step", "cosine", "linear"};
}

double scheduled_lr(const ScheduleOptions& options, double base_lr, int64_t step) {
  if (options.warmup_steps < 0) {
    throw UsageError("schedule " + options.name + ": warmup_steps is " +
                     std::to_string(options.warmup_steps) + ", it must be 0 or more");
  }
  // Also evaluated during the warm-up, so that a bad option shows at the first step.
  const double after = main_part(options, base_lr, std::max(step, options.warmup_steps));
  if (step >= options.warmup_steps) return after;
  return base_lr * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
}

}  // namespace lockstep
