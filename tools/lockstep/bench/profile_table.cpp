#include <algorithm>
#include <array>

#include "lockstep/base/file.h"
#include "lockstep/base/words.h"
#include "lockstep/train/step_profiler.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

/// As many as fit on a screen; a trace has them all.
constexpr size_t kOperationsShown = 20;

/// What comes after "step" is no part of the sum: it ran beside the others.
constexpr const char* kLines[] = {"data",      "forward", "backward", "communication exposed",
                                  "optimizer", "rest",    "step",     "communication hidden"};

/// Microseconds, by line.
std::array<double, std::size(kLines)> lines_of(const StepBreakdown& step) {
  const auto part = [&](StepPart which) { return step.parts[static_cast<size_t>(which)]; };
  return {part(StepPart::data),
          part(StepPart::forward),
          part(StepPart::backward),
          step.exposed,
          part(StepPart::optimizer),
          step.rest,
          step.step,
          step.hidden};
}

Figures figures_of(const std::vector<StepBreakdown>& steps, size_t line) {
  Figures figures;
  for (const auto& step : steps) figures.push_back(lines_of(step)[line]);
  return figures;
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
  std::vector<StepBreakdown> first, typical;  // Rank 0's steps, and one of each rank.
  for (const auto& profile : profiles) {
    auto steps = analyse(profile).steps;
    typical.push_back(typical_step(steps));
    if (first.empty()) first = std::move(steps);
  }
  const double whole = typical.front().step;
  row["profile"] = BenchRow::array();
  for (size_t line = 0; line < std::size(kLines); ++line) {
    const Figures of_ranks = figures_of(typical, line);
    const auto [least, most] = std::minmax_element(of_ranks.begin(), of_ranks.end());
    row["profile"].push_back({{"part", kLines[line]},
                              {"us", of_ranks.front()},
                              {"share", of_ranks.front() / whole},
                              {"median_us", median(figures_of(first, line))},
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

std::string step_text(const BenchRows& rows) {
  if (!rows.front().contains("profile")) return bench_table(rows);
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
