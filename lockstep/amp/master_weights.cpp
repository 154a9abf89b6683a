#include "lockstep/amp/master_weights.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/optim/optimizer_state.h"

namespace lockstep {
namespace {

constexpr const char* kMaster = "master_param";

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

/// A leaf of its own, in the parameter's layout.
at::Tensor master_of(const at::Tensor& parameter) {
  return is_half(parameter)
             ? parameter.detach().to(at::kFloat).set_requires_grad(parameter.requires_grad())
             : parameter;
}

}  // namespace

MasterWeights::MasterWeights(std::vector<at::Tensor> parameters, const Factory& make)
    : parameters_(std::move(parameters)), versions_(parameters_.size(), -1) {
  for (const at::Tensor& parameter : parameters_) masters_.push_back(master_of(parameter));
  inner_ = make(masters_);
  if (!inner_->needs_closure()) return;
  throw UsageError("float32 copies of the parameters: the optimizer " + inner_->name() +
                       " changes parameters several times in a step, and the copies are rounded "
                       "into the model only at its end",
                   "take --precision 32-true or bf16-mixed, or another optimizer");
}

bool MasterWeights::has_copy(size_t index) const {
  return is_half(parameters_[index]);
}

/// Only where a count of changes has moved is there something to compare. Counts are shared by all
/// views of one buffer, so a moved one need not mean a change.
void MasterWeights::adopt_changes() const {
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor parameter = parameters_[i].detach();
    if (!has_copy(i) || versions_[i] == parameter._version()) continue;
    const at::Tensor changed = parameter.ne(masters_[i].to(parameter.scalar_type()));
    if (changed.any().item<bool>()) {
      masters_[i].copy_(at::where(changed, parameter.to(at::kFloat), masters_[i]));
    }
    versions_[i] = parameter._version();
  }
}

void MasterWeights::round_into_parameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!has_copy(i)) continue;
    parameters_[i].copy_(masters_[i]);
    versions_[i] = parameters_[i]._version();
  }
}

void MasterWeights::step_scaled(const StepScale& scale) {
  if (scale.found_inf.defined() && scale.found_inf.item<double>() != 0) return;
  const c10::AutoGradMode no_grad(false);
  adopt_changes();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!has_copy(i)) continue;
    const at::Tensor& gradient = parameters_[i].grad();
    masters_[i].mutable_grad() = gradient.defined() ? gradient.to(at::kFloat) : at::Tensor();
  }
  scale.grad_scale.defined() ? inner_->step_scaled({scale.grad_scale, {}}) : inner_->step();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_copy(i)) masters_[i].mutable_grad().reset();
  }
  round_into_parameters();
}

OptimizerState MasterWeights::state() const {
  adopt_changes();
  OptimizerState state = inner_->state();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_copy(i)) state.emplace_back(state_key(kMaster, i), masters_[i].detach());
  }
  return state;
}

void MasterWeights::load_state(const OptimizerState& state) {
  OptimizerState inner, copies;
  for (const auto& item : state) {
    const bool is_copy = item.first.starts_with(std::string(kMaster) + ".");
    (is_copy ? copies : inner).push_back(item);
  }
  const auto entries =
      read_state(name(), copies, {{kMaster, StateKind::like_parameter}}, parameters_);
  std::vector<at::Tensor> loaded(parameters_.size());
  for (const StateEntry& entry : entries) loaded[entry.index] = entry.tensor;
  for (size_t i = 0; i < parameters_.size() && !entries.empty(); ++i) {
    // A part of a parameter that has no elements, as ZeRO gives it to ranks, need have no copy.
    if (has_copy(i) == loaded[i].defined() || parameters_[i].numel() == 0) continue;
    throw CheckpointError(name() + ": the optimizer state " + (has_copy(i) ? "lacks" : "has") +
                              " '" + state_key(kMaster, i) + "'",
                          "the checkpoint is damaged or of another precision");
  }
  inner_->load_state(inner);
  const c10::AutoGradMode no_grad(false);
  if (entries.empty()) return adopt_changes();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_copy(i) && loaded[i].defined()) masters_[i].copy_(loaded[i]);
  }
  round_into_parameters();
}

}  // namespace lockstep
