#include "lockstep/train/step_profiler.h"

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"

namespace lockstep {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TimeSpan, begin, end)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PartSpan, part, time)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CallSpan, name, bytes, time, returned)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(OperationSpan, name, thread, time)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepProfile, rank, steps, parts, calls, operations)

namespace {

using Spans = std::vector<TimeSpan>;

constexpr double kNanosecondsInMicrosecond = 1000;

/// The same points in time as spans that neither overlap nor touch, in order.
Spans united(Spans spans) {
  std::erase_if(spans, [](const TimeSpan& span) { return span.length() <= 0; });
  std::sort(spans.begin(), spans.end(),
            [](const TimeSpan& a, const TimeSpan& b) { return a.begin < b.begin; });
  Spans result;
  for (const TimeSpan& span : spans) {
    if (result.empty() || span.begin > result.back().end) {
      result.push_back(span);
    } else {
      result.back().end = std::max(result.back().end, span.end);
    }
  }
  return result;
}

/// What lies in both; both as `united` gives them.
Spans common(const Spans& a, const Spans& b) {
  Spans result;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const TimeSpan both{std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end)};
    if (both.length() > 0) result.push_back(both);
    a[i].end < b[j].end ? ++i : ++j;
  }
  return result;
}

double microseconds(const Spans& spans) {
  int64_t sum = 0;
  for (const TimeSpan& span : spans) sum += span.length();
  return static_cast<double>(sum) / kNanosecondsInMicrosecond;
}

double microseconds(const TimeSpan& span) {
  return microseconds(Spans{span});
}

/// When the thread that trains waited for the collectives that began within `place`. `calls`: in
/// the order in which they began.
Spans waits_within(const TimeSpan& place, const std::vector<CallSpan>& calls) {
  auto call = std::lower_bound(
      calls.begin(), calls.end(), place.begin,
      [](const CallSpan& candidate, int64_t time) { return candidate.time.begin < time; });
  Spans blocked, running;
  int64_t last_return = place.begin;
  for (; call != calls.end() && call->time.begin < place.end; ++call) {
    blocked.push_back({call->time.begin, call->returned});
    running.push_back({call->time.begin, std::min(call->time.end, place.end)});
    last_return = std::max(last_return, call->returned);
  }
  if (running.empty()) return {};
  blocked.push_back({last_return, place.end});
  return common(united(blocked), united(running));
}

/// What of a step lies in none of its parts.
Spans gaps(const TimeSpan& step, const std::vector<PartSpan>& parts, size_t first, size_t end) {
  Spans result;
  int64_t from = step.begin;
  for (size_t i = first; i < end; ++i) {
    result.push_back({from, parts[i].time.begin});
    from = parts[i].time.end;
  }
  result.push_back({from, step.end});
  return united(result);
}

std::vector<CallSpan> in_order(std::vector<CallSpan> calls) {
  std::stable_sort(calls.begin(), calls.end(), [](const CallSpan& a, const CallSpan& b) {
    return a.time.begin < b.time.begin;
  });
  return calls;
}

}  // namespace

const char* step_part_name(StepPart part) {
  static constexpr std::array<const char*, kStepParts> kNames = {"data", "forward", "backward",
                                                                 "optimizer"};
  return kNames[static_cast<size_t>(part)];
}

ProfileAnalysis analyse(const StepProfile& profile) {
  ProfileAnalysis result;
  const std::vector<CallSpan> calls = in_order(profile.calls);
  Spans running;
  for (const CallSpan& call : calls) running.push_back(call.time);
  running = united(running);
  size_t next = 0;
  for (const TimeSpan& step : profile.steps) {
    StepBreakdown times;
    times.step = microseconds(step);
    const size_t first = next;
    for (; next < profile.parts.size() && profile.parts[next].time.begin < step.end; ++next) {
      const PartSpan& part = profile.parts[next];
      const Spans waits = waits_within(part.time, calls);
      times.parts[static_cast<size_t>(part.part)] += microseconds(part.time) - microseconds(waits);
      times.exposed += microseconds(waits);
      result.waits.insert(result.waits.end(), waits.begin(), waits.end());
    }
    for (const TimeSpan& gap : gaps(step, profile.parts, first, next)) {
      const Spans waits = waits_within(gap, calls);
      times.rest += microseconds(gap) - microseconds(waits);
      times.exposed += microseconds(waits);
      result.waits.insert(result.waits.end(), waits.begin(), waits.end());
    }
    // What was exposed lies within what ran; the sums may differ in their last bits.
    times.hidden = std::max(0.0, microseconds(common({step}, running)) - times.exposed);
    result.steps.push_back(times);
  }
  result.waits = united(result.waits);
  return result;
}

StepBreakdown typical_step(std::vector<StepBreakdown> steps) {
  if (steps.empty()) throw UsageError("a profile without steps");
  std::sort(steps.begin(), steps.end(),
            [](const StepBreakdown& a, const StepBreakdown& b) { return a.step < b.step; });
  const size_t quarter = steps.size() / 4;
  const auto count = static_cast<double>(steps.size() - 2 * quarter);
  constexpr double StepBreakdown::*kTimes[] = {&StepBreakdown::exposed, &StepBreakdown::rest,
                                               &StepBreakdown::step, &StepBreakdown::hidden};
  StepBreakdown sum;
  for (size_t i = quarter; i < steps.size() - quarter; ++i) {
    for (size_t part = 0; part < kStepParts; ++part) sum.parts[part] += steps[i].parts[part];
    for (const auto time : kTimes) sum.*time += steps[i].*time;
  }
  for (double& part : sum.parts) part /= count;
  for (const auto time : kTimes) sum.*time /= count;
  return sum;
}

std::vector<OperationCost> operation_costs(const StepProfile& profile) {
  auto spans = profile.operations;
  std::stable_sort(spans.begin(), spans.end(), [](const OperationSpan& a, const OperationSpan& b) {
    if (a.thread != b.thread) return a.thread < b.thread;
    if (a.time.begin != b.time.begin) return a.time.begin < b.time.begin;
    return a.time.end > b.time.end;
  });
  struct Sum {
    int64_t calls = 0;
    int64_t self = 0;
  };
  std::map<std::string, Sum> sums;
  std::vector<const OperationSpan*> open;  // Each within the one before.
  for (const OperationSpan& span : spans) {
    while (!open.empty() &&
           (open.back()->thread != span.thread || open.back()->time.end <= span.time.begin)) {
      open.pop_back();
    }
    if (!open.empty()) sums[open.back()->name].self -= span.time.length();
    Sum& sum = sums[span.name];
    ++sum.calls;
    sum.self += span.time.length();
    open.push_back(&span);
  }
  const auto steps = static_cast<double>(std::max<size_t>(profile.steps.size(), 1));
  std::vector<OperationCost> costs;
  for (const auto& [name, sum] : sums) {
    costs.push_back({name, static_cast<double>(sum.calls) / steps,
                     static_cast<double>(sum.self) / kNanosecondsInMicrosecond / steps});
  }
  std::stable_sort(costs.begin(), costs.end(), [](const OperationCost& a, const OperationCost& b) {
    return a.self_us > b.self_us;
  });
  return costs;
}

nlohmann::json to_object(const StepProfile& profile) {
  return profile;
}

StepProfile profile_from(const nlohmann::json& object) {
  return object;
}

}  // namespace lockstep
