#include <algorithm>
#include <functional>

#include "lockstep/base/file.h"
#include "lockstep/base/words.h"
#include "lockstep/train/step_profiler.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

/// As many as fit on a screen; a trace has them all.
constexpr size_t kOperationsShown = 20;

using Figure = std::function<double(const StepBreakdown&)>;

struct Line {
  const char* part;
  Figure us;
};

Figure part_of(StepPart part) {
  return [part](const StepBreakdown& step) { return step.parts[static_cast<size_t>(part)]; };
}

/// What comes after "step" is no part of the sum: it ran beside the others.
const std::vector<Line>& lines() {
  static const std::vector<Line> all = {
      {"data", part_of(StepPart::data)},
      {"forward", part_of(StepPart::forward)},
      {"backward", part_of(StepPart::backward)},
      {"communication exposed", [](const StepBreakdown& step) { return step.exposed; }},
      {"optimizer", part_of(StepPart::optimizer)},
      {"rest", [](const StepBreakdown& step) { return step.rest; }},
      {"step", [](const StepBreakdown& step) { return step.step; }},
      {"communication hidden", [](const StepBreakdown& step) { return step.hidden; }},
  };
  return all;
}

double median_of(const std::vector<StepBreakdown>& steps, const Figure& figure) {
  std::vector<double> values;
  for (const auto& step : steps) values.push_back(figure(step));
  return median(std::move(values));
}

std::vector<StepProfile> profiles_from(const nlohmann::json& objects) {
  std::vector<StepProfile> profiles;
  for (const auto& object : objects) profiles.push_back(profile_from(object));
  return profiles;
}

/// An operation's name without what they all have in common.
std::string short_name(const std::string& name) {
  constexpr const char* kEngine = "autograd::engine::evaluate_function: ";
  return name.starts_with(kEngine) ? "engine: " + name.substr(std::string(kEngine).size()) : name;
}

}  // namespace

void add_profile(BenchRow& row, const nlohmann::json& objects) {
  const auto profiles = profiles_from(objects);
  std::vector<std::vector<StepBreakdown>> steps;
  std::vector<StepBreakdown> typical;
  for (const auto& profile : profiles) {
    steps.push_back(analyse(profile).steps);
    typical.push_back(typical_step(steps.back()));
  }
  const double whole = typical.front().step;
  row["profile"] = BenchRow::array();
  for (const auto& [name, figure] : lines()) {
    std::vector<double> of_ranks;
    for (const auto& rank : typical) of_ranks.push_back(figure(rank));
    const auto [least, most] = std::minmax_element(of_ranks.begin(), of_ranks.end());
    row["profile"].push_back({{"part", name},
                              {"us", of_ranks.front()},
                              {"share", of_ranks.front() / whole},
                              {"median_us", median_of(steps.front(), figure)},
                              {"rank_min_us", *least},
                              {"rank_max_us", *most}});
  }
  if (profiles.front().operations.empty()) return;
  row["operations"] = BenchRow::array();
  for (const auto& cost : operation_costs(profiles.front())) {
    row["operations"].push_back({{"operation", short_name(cost.name)},
                                 {"calls", cost.calls},
                                 {"us", cost.self_us},
                                 {"share", cost.self_us / whole}});
  }
}

void write_trace(const std::filesystem::path& file, const nlohmann::json& profiles,
                 const nlohmann::ordered_json& metadata) {
  write_file_atomically(file, chrome_trace(profiles_from(profiles), metadata).dump() + "\n");
}

std::string profile_tables(const BenchRows& rows) {
  std::string text;
  for (const auto& row : rows) {
    if (!text.empty()) text += '\n';
    text += row["model"].get<std::string>() + ", batch " +
            std::to_string(row["batch_size"].get<int64_t>()) + ", " +
            counted(row["ranks"].get<int64_t>(), "rank") + " over " +
            row["backend"].get<std::string>() + "\n";
    text += bench_table(row["profile"].get<BenchRows>());
    if (!row.contains("operations")) continue;
    auto operations = row["operations"].get<BenchRows>();
    if (operations.size() > kOperationsShown) operations.resize(kOperationsShown);
    text += '\n' + bench_table(operations);
  }
  return text;
}

}  // namespace lockstep::tool
