#pragma once

#include <string>
#include <vector>

namespace lockstep::tool {

/// What `lockstep bench pipeline` says of itself in the list of benchmarks.
inline constexpr const char* kPipelineBenchSummary =
    "Measures how much of a pipeline's time is bubble, by a simulated clock and with stages that "
    "sleep instead of computing, beside the formula of the schedule's authors.";

/// `lockstep bench pipeline ARGS`.
int bench_pipeline(const std::vector<std::string>& args);

}  // namespace lockstep::tool
