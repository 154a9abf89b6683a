#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {

/// The worker of `bench scaling`: trains on all samples, as often as `epochs` says, and gives rank
/// 0's `seconds` of an epoch (the median) and `parts`, the seconds that each part of its steps
/// took.
nlohmann::json bench_scaling_worker(const nlohmann::json& config);

/// Adds to rows of one job with several numbers of ranks, the first of which has the fewest:
/// - `speedup` and `efficiency`, against the first row. As much as the ranks are more is 1.
/// - `lost_s`, per part: by how much it took longer than the first row's, divided by the ranks.
void add_speedup(BenchRows& rows);

/// A sentence per row: how much faster, and what ate the rest.
std::string scaling_text(const BenchRows& rows);

/// Writes a picture of speed-up over ranks, a line per model and strategy, beside the ideal.
void write_scaling_plot(const std::filesystem::path& file, const BenchRows& rows);

}  // namespace lockstep::tool
