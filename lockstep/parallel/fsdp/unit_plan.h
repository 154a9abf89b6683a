#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel/flat_unit.h"
#include "lockstep/parallel/module_state.h"

namespace lockstep::detail {

/// Parameters that are gathered, freed and reduced together: those of one module.
struct PlannedUnit {
  std::string name;                     ///< Of the module; "" is the whole.
  std::vector<NamedTensor> parameters;  ///< Each tensor once, in the module's order.
};

/// Cuts a module into units. What belongs to no other unit is the first unit, that of the whole.
///
/// `names` are the full names of the modules that are units. "h.*" stands for all children of h. A
/// unit within a unit is one of its own. Modules without parameters are left out. Throws UsageError
/// for a name that the module does not have, with the nearest.
///
/// Without `names` the size decides. A module of at least `min_elements` is a unit, unless there is
/// a list in it (Sequential, ModuleList, ModuleDict, numbered children) with two such modules or
/// more: then it is cut further. So the blocks of a transformer are units, and small layers stay
/// together.
std::vector<PlannedUnit> plan_units(const torch::nn::Module& module,
                                    const std::vector<std::string>& names, int64_t min_elements);

/// Gives each parameter its place. A unit with parameters of several dtypes becomes one for each.
/// Every rank's shard is as large, and no parameter has the last element of the last one.
std::vector<FlatUnit> lay_out(const std::vector<PlannedUnit>& planned,
                              const torch::nn::Module& module, int ranks);

}  // namespace lockstep::detail
