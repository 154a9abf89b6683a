#pragma once

#include <nlohmann/json.hpp>

namespace lockstep::tool {

/// What `lockstep env` says, in the order in which it says it: lockstep, libtorch, python,
/// backends, mpi, devices, cpu, interfaces, launcher, data, missing.
nlohmann::ordered_json environment_report();

/// The machine as a benchmark's reader needs it: cpu, cores, capability, versions, load, date.
nlohmann::ordered_json machine_context();

}  // namespace lockstep::tool
