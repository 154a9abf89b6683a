#include "lockstep/autograd/recorded_state.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <mutex>

namespace lockstep {
namespace {

at::Generator generator_of(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

at::Tensor random_state(c10::Device device) {
  at::Generator generator = generator_of(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(c10::Device device, const at::Tensor& state) {
  at::Generator generator = generator_of(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// The innermost one of this thread.
thread_local const RecordedGuard* current_guard = nullptr;

}  // namespace

RecordedGuard::RecordedGuard(Enter enter) : enter_(std::move(enter)), outer_(current_guard) {
  current_guard = this;
}

RecordedGuard::~RecordedGuard() {
  current_guard = outer_;
}

std::vector<RecordedGuard::Enter> RecordedGuard::all() {
  std::vector<Enter> all;
  for (const RecordedGuard* guard = current_guard; guard != nullptr; guard = guard->outer_)
    all.insert(all.begin(), guard->enter_);
  return all;
}

RecordedState RecordedState::record(const std::vector<c10::Device>& devices, bool random) {
  RecordedState state;
  if (random) {
    state.generators_.emplace_back(c10::kCPU, random_state(c10::kCPU));
    for (const c10::Device device : devices) {
      if (device.is_cuda()) state.generators_.emplace_back(device, random_state(device));
    }
  }
  for (const auto device : {c10::kCPU, c10::kCUDA}) {
    state.autocast_.push_back({device, at::autocast::is_autocast_enabled(device),
                               at::autocast::get_autocast_dtype(device)});
  }
  state.autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  state.guards_ = RecordedGuard::all();
  return state;
}

void RecordedState::apply() const {
  for (const auto& [device, state] : generators_) set_random_state(device, state);
  for (const Autocast& autocast : autocast_) {
    at::autocast::set_autocast_enabled(autocast.device, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
}

RecordedState::Replay::Replay(const RecordedState& state) {
  std::vector<c10::Device> devices;
  for (const auto& [device, generator] : state.generators_) devices.push_back(device);
  before_ = std::make_unique<RecordedState>(record(devices, !state.generators_.empty()));
  at::autocast::increment_nesting();
  state.apply();
  for (const auto& enter : state.guards_) guards_.push_back(enter());
}

RecordedState::Replay::~Replay() {
  while (!guards_.empty()) guards_.pop_back();
  // Casts of parameters that the second run made belong to its graph.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  before_->apply();
}

}  // namespace lockstep
