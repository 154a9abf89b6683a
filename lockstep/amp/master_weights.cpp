#include "lockstep/amp/precision.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/optim/dense_layout.h"
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

/// Compared at once: the rounded copy of so many elements stays in a processor's cache. A whole one
/// would be new memory in every step, which costs more than the comparison.
constexpr int64_t kCompared = 1 << 17;

/// Whether the parameter has other bits than its copy rounds to. Its count of changes cannot tell:
/// collectives do not move it. One pass over both. On another device than the CPU the answer is
/// yes, as to ask would stop it.
bool may_differ(const at::Tensor& parameter, const at::Tensor& master) {
  if (!parameter.device().is_cpu()) return true;
  if (!is_dense(parameter) || !is_dense(master) || !same_order(parameter, master)) {
    return parameter.ne(master.to(parameter.scalar_type())).any().item<bool>();
  }
  const int64_t count = parameter.numel();
  const at::Tensor elements = head(parameter, count), copies = head(master, count);
  const at::Tensor rounded = at::empty({std::min(count, kCompared)}, parameter.options());
  for (int64_t begin = 0; begin < count; begin += kCompared) {
    const int64_t size = std::min(count - begin, kCompared);
    const at::Tensor part = elements.narrow(0, begin, size);
    rounded.narrow(0, 0, size).copy_(copies.narrow(0, begin, size));
    if (std::memcmp(part.const_data_ptr(), rounded.const_data_ptr(), part.nbytes()) != 0) {
      return true;
    }
  }
  return false;
}

}  // namespace

MasterWeights::MasterWeights(std::vector<at::Tensor> parameters, const OptimizerFactory& make)
    : parameters_(std::move(parameters)) {
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

void MasterWeights::adopt_changes() const {
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor parameter = parameters_[i].detach();
    if (!has_copy(i) || !may_differ(parameter, masters_[i].detach())) continue;
    const at::Tensor changed = parameter.ne(masters_[i].to(parameter.scalar_type()));
    masters_[i].copy_(at::where(changed, parameter.to(at::kFloat), masters_[i]));
  }
}

void MasterWeights::round_into_parameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_copy(i)) parameters_[i].copy_(masters_[i]);
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

StateDict MasterWeights::state() const {
  adopt_changes();
  StateDict state = inner_->state();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_copy(i)) state.emplace_back(state_key(kMaster, i), masters_[i].detach());
  }
  return state;
}

void MasterWeights::load_state(const StateDict& state) {
  StateDict inner, copies;
  for (const auto& item : state) {
    const bool is_copy = item.first.starts_with(std::string(kMaster) + ".");
    (is_copy ? copies : inner).push_back(item);
  }
  const auto entries = read_state(name(), copies, {kMaster}, parameters_);
  std::vector<at::Tensor> loaded(parameters_.size());
  for (const auto& [index, fields] : entries) loaded[index] = fields.at(kMaster);
  for (size_t i = 0; i < parameters_.size() && !entries.empty(); ++i) {
    // A part of a parameter that has no elements, as ZeRO gives it to ranks, need have no copy.
    if (has_copy(i) == loaded[i].defined() || parameters_[i].numel() == 0) continue;
    throw CheckpointError(name() + ": the optimizer state " + (has_copy(i) ? "lacks" : "has") +
                              " '" + state_key(kMaster, i) + "'",
                          "the checkpoint is damaged or of another precision");
  }
  inner_->load_state(inner);
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!has_copy(i)) continue;
    masters_[i].copy_(loaded[i].defined() ? loaded[i] : parameters_[i]);
  }
  round_into_parameters();
}

}  // namespace lockstep
