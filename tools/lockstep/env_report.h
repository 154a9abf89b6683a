#pragma once

#include <nlohmann/json.hpp>

namespace lockstep::tool {

/// The machine as a benchmark's reader needs it: cpu, cores, capability, versions, load, date.
nlohmann::ordered_json machine_context();

}  // namespace lockstep::tool
