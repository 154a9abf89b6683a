#include "lockstep/train/random_state.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <mutex>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

std::vector<std::pair<std::string, c10::Device>> generators(c10::Device device) {
  std::vector<std::pair<std::string, c10::Device>> all{{"rng.cpu", c10::kCPU}};
  if (device.is_cuda()) all.emplace_back("rng.cuda", device);
  return all;
}

}  // namespace

StateDict random_state(c10::Device device) {
  StateDict state;
  for (const auto& [name, where] : generators(device)) {
    at::Generator generator = at::globalContext().defaultGenerator(where);
    const std::lock_guard lock(generator.mutex());
    state.emplace_back(name, generator.get_state().clone());
  }
  return state;
}

void set_random_state(const StateDict& state, c10::Device device) {
  for (const auto& [name, where] : generators(device)) {
    const at::Tensor* found = nullptr;
    for (const auto& [key, tensor] : state) {
      if (key == name) found = &tensor;
    }
    if (!found && !where.is_cpu()) continue;  // Saved by a run on the CPU.
    if (!found) throw CheckpointError("the checkpoint lacks the random state " + name);
    at::Generator generator = at::globalContext().defaultGenerator(where);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(*found);
  }
}

}  // namespace lockstep
