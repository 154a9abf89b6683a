#pragma once

#include <string>
#include <utility>
#include <vector>

namespace at {
class Tensor;
}

namespace lockstep {

/// Tensors by name, in order: a module's, as in Python's state_dict, an optimizer's, or a file's.
using StateDict = std::vector<std::pair<std::string, at::Tensor>>;

}  // namespace lockstep
