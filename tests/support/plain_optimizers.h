#pragma once

#include <string>
#include <vector>

#include "lockstep/optim/optim.h"

namespace lockstep::test {

/// Those that step from the gradients that are there. lbfgs computes its own by a closure.
inline std::vector<std::string> plain_optimizers() {
  std::vector<std::string> names = optimizer_names();
  std::erase(names, "lbfgs");
  return names;
}

}  // namespace lockstep::test
