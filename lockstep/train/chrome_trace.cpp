#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/train/step_profiler.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

// The rows of a rank, in this order.
constexpr int kMainRow = 0;
constexpr int kFirstCommunicationRow = 1;
constexpr int kFirstOperationRow = 100;

/// Writes one rank's events.
class RankEvents {
 public:
  RankEvents(Json& events, int rank, int64_t origin)
      : events_(events), rank_(rank), origin_(origin) {}

  void name_process() {
    metadata("process_name", kMainRow, {{"name", "rank " + std::to_string(rank_)}});
    metadata("process_sort_index", kMainRow, {{"sort_index", rank_}});
  }
  void name_row(int row, const std::string& name) {
    metadata("thread_name", row, {{"name", name}});
    metadata("thread_sort_index", row, {{"sort_index", row}});
  }
  void add(int row, const std::string& category, const std::string& name, const TimeSpan& time,
           Json arguments = Json::object()) {
    Json event = {{"ph", "X"},
                  {"name", name},
                  {"cat", category},
                  {"pid", rank_},
                  {"tid", row},
                  {"ts", microseconds(time.begin - origin_)},
                  {"dur", microseconds(time.length())}};
    if (!arguments.empty()) event["args"] = std::move(arguments);
    events_.push_back(std::move(event));
  }

 private:
  static double microseconds(int64_t nanoseconds) {
    return static_cast<double>(nanoseconds) / 1000;
  }
  void metadata(const char* what, int row, Json arguments) {
    events_.push_back(
        {{"ph", "M"}, {"name", what}, {"pid", rank_}, {"tid", row}, {"args", arguments}});
  }

  Json& events_;
  int rank_;
  int64_t origin_;
};

/// Gives each call the first row that is free when it begins, as rows show nothing that overlaps.
int row_for(const TimeSpan& time, std::vector<int64_t>& busy_until) {
  size_t row = 0;
  while (row < busy_until.size() && busy_until[row] > time.begin) ++row;
  if (row == busy_until.size()) busy_until.push_back(0);
  busy_until[row] = time.end;
  return static_cast<int>(row);
}

void add_calls(RankEvents& events, std::vector<CallSpan> calls) {
  std::stable_sort(calls.begin(), calls.end(), [](const CallSpan& a, const CallSpan& b) {
    return a.time.begin < b.time.begin;
  });
  std::vector<int64_t> busy_until;
  for (const CallSpan& call : calls) {
    const int row = row_for(call.time, busy_until);
    const double blocked = static_cast<double>(call.returned - call.time.begin) / 1000;
    events.add(kFirstCommunicationRow + row, "communication", call.name, call.time,
               {{"bytes", call.bytes}, {"caller_blocked_us", blocked}});
  }
  for (size_t row = 0; row < busy_until.size(); ++row) {
    events.name_row(kFirstCommunicationRow + static_cast<int>(row),
                    row == 0 ? "communication" : "communication " + std::to_string(row + 1));
  }
}

void add_operations(RankEvents& events, const std::vector<OperationSpan>& operations) {
  int threads = 0;
  for (const OperationSpan& span : operations) {
    events.add(kFirstOperationRow + span.thread, "operation", span.name, span.time);
    threads = std::max(threads, span.thread + 1);
  }
  for (int thread = 0; thread < threads; ++thread) {
    events.name_row(
        kFirstOperationRow + thread,
        thread == 0 ? "operations" : "operations, thread " + std::to_string(thread + 1));
  }
}

void add_rank(Json& events, const StepProfile& profile, int64_t origin) {
  RankEvents rank(events, profile.rank, origin);
  rank.name_process();
  rank.name_row(kMainRow, "main thread");
  for (size_t i = 0; i < profile.steps.size(); ++i) {
    rank.add(kMainRow, "step", "step " + std::to_string(i), profile.steps[i]);
  }
  for (const PartSpan& span : profile.parts) {
    rank.add(kMainRow, "part", step_part_name(span.part), span.time);
  }
  for (const TimeSpan& wait : analyse(profile).waits) {
    rank.add(kMainRow, "wait", "wait for communication", wait);
  }
  add_calls(rank, profile.calls);
  add_operations(rank, profile.operations);
}

}  // namespace

Json chrome_trace(const std::vector<StepProfile>& ranks, const Json& metadata) {
  int64_t origin = std::numeric_limits<int64_t>::max();
  for (const StepProfile& rank : ranks) {
    if (!rank.steps.empty()) origin = std::min(origin, rank.steps.front().begin);
  }
  if (origin == std::numeric_limits<int64_t>::max()) origin = 0;
  Json events = Json::array();
  for (const StepProfile& rank : ranks) add_rank(events, rank, origin);
  return {{"traceEvents", std::move(events)}, {"displayTimeUnit", "ns"}, {"otherData", metadata}};
}

}  // namespace lockstep
