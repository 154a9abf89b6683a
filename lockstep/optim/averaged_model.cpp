#include "lockstep/optim/averaged_model.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <unordered_map>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr const char* kCount = "n_averaged";

void average(at::Tensor& average, const at::Tensor& now, const std::optional<double>& decay,
             int64_t count) {
  if (!decay) {
    average.copy_(average + (now - average) / (count + 1));
  } else if (average.is_floating_point() || average.is_complex()) {
    average.lerp_(now, 1 - *decay);
  } else {
    average.copy_(average * *decay + now * (1 - *decay));
  }
}

}  // namespace

AveragedModel::AveragedModel(torch::nn::Module& module, const AveragedModelOptions& options)
    : options_(options) {
  if (options.decay && !(*options.decay >= 0 && *options.decay <= 1)) {
    throw UsageError("AveragedModel: the decay must be in [0, 1], got " +
                     std::to_string(*options.decay));
  }
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      const size_t index = names_.size();
      const auto [first, is_new] = seen.emplace(item.value().unsafeGetTensorImpl(), index);
      names_.push_back("module." + item.key());
      tensors_.push_back(item.value().detach());
      averages_.push_back(is_new ? item.value().detach().clone() : averages_[first->second]);
      if (is_new) own_.push_back(index);
    }
  };
  add(module.named_parameters());
  parameters_ = tensors_.size();
  add(module.named_buffers());
}

void AveragedModel::update_parameters() {
  require_own_weights("update_parameters()");
  const c10::AutoGradMode no_grad(false);
  for (const size_t i : own_) {
    const bool averaged = i < parameters_ || options_.use_buffers;
    if (averaged && n_averaged_ > 0) {
      average(averages_[i], tensors_[i], options_.decay, n_averaged_);
    } else {
      averages_[i].copy_(tensors_[i]);
    }
  }
  ++n_averaged_;
}

void AveragedModel::require_update(const char* call) const {
  if (n_averaged_ > 0) return;
  throw UsageError(std::string("AveragedModel: ") + call + " before any update",
                   "call update_parameters() after a step");
}

void AveragedModel::require_own_weights(const char* call) const {
  if (!swapped_) return;
  throw UsageError(std::string("AveragedModel: ") + call + " while the average is swapped in",
                   "let go of what swapped_in() gave first");
}

void AveragedModel::swap() {
  const c10::AutoGradMode no_grad(false);
  swapped_ = !swapped_;
  for (const size_t i : own_) {
    const at::Tensor kept = tensors_[i].clone();
    tensors_[i].copy_(averages_[i]);
    averages_[i].copy_(kept);
  }
}

std::shared_ptr<void> AveragedModel::swapped_in() {
  require_update("swapped_in()");
  require_own_weights("swapped_in()");
  swap();
  return {this, [](AveragedModel* self) { self->swap(); }};
}

void AveragedModel::copy_to_module() const {
  require_update("copy_to_module()");
  require_own_weights("copy_to_module()");
  const c10::AutoGradMode no_grad(false);
  for (const size_t i : own_) tensors_[i].copy_(averages_[i]);
}

StateDict AveragedModel::state_dict() const {
  require_own_weights("state_dict()");
  StateDict state{{kCount, at::full({1}, n_averaged_, at::kLong)}};
  for (size_t i = 0; i < averages_.size(); ++i) state.emplace_back(names_[i], averages_[i]);
  return state;
}

void AveragedModel::load_state_dict(const StateDict& state) {
  require_own_weights("load_state_dict()");
  const std::map<std::string, at::Tensor> given(state.begin(), state.end());
  const auto require = [&](const std::string& name, at::IntArrayRef shape) {
    const auto entry = given.find(name);
    const bool lacks = entry == given.end();
    if (!lacks && entry->second.sizes() == shape) return entry->second;
    const bool is_scalar = !lacks && name == kCount && entry->second.dim() == 0;
    if (is_scalar) return entry->second;  // As Python writes it.
    throw CheckpointError("AveragedModel: the state " +
                              std::string(lacks ? "lacks '" : "has another shape for '") + name +
                              "'",
                          "it is of another model");
  };
  const at::Tensor count = require(kCount, {1});
  std::vector<at::Tensor> loaded;
  for (size_t i = 0; i < averages_.size(); ++i) {
    loaded.push_back(require(names_[i], averages_[i].sizes()));
  }
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < averages_.size(); ++i) averages_[i].copy_(loaded[i]);
  n_averaged_ = count.item<int64_t>();
}

}  // namespace lockstep
