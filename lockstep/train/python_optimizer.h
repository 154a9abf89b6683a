#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "lockstep/base/state_dict.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// The state of an optimizer that Python has saved, for Optimizer::load_state or
/// Trainer::load_optimizer: `optimizer.state_dict()`, alone or within a dict that has other things
/// too, in any file or folder that TensorReader takes. Parameters are told by their names where the
/// file has them, else by their order in `module`, which must be that of Python's.
///
/// Only the state is taken: learning rate, momentum and the like are options here. A warning names
/// each of `settings`, by Python's names of them ("lr"), that the file has otherwise.
///
/// A checkpoint of Lockstep, or a folder of them, is taken too, without a warning of settings.
///
/// Throws DataError for a file without an optimizer's state, or with several, or with groups of
/// parameters without names. Throws CheckpointError for a parameter that `module` does not have.
StateDict load_python_optimizer(const std::filesystem::path& path, const torch::nn::Module& module,
                                const std::map<std::string, double>& settings = {});

}  // namespace lockstep
