#include "lockstep/parallel/zero/sharded_optimizer.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "lockstep/base/error.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep::detail {
namespace {

/// Made for nothing, to be asked.
bool may_cut(const std::vector<at::Tensor>& parameters, const OptimizerFactory& make) {
  std::vector<at::Tensor> nothing;
  for (const at::Tensor& parameter : parameters)
    nothing.push_back(at::empty({0}, parameter.options().requires_grad(false)));
  return make(std::move(nothing))->is_elementwise();
}

/// Whole gradients of one bucket are there at a time, beside the shards. So it is a small part of
/// the model, but large enough that calls cost little.
int64_t small_cap(const std::vector<at::Tensor>& parameters) {
  constexpr int64_t kLeast = 1 << 20, kMost = 25 << 20, kPart = 50;
  return std::clamp(bytes_of(parameters) / kPart, kLeast, kMost);
}

ParameterShards make_shards(std::vector<at::Tensor> parameters, const OptimizerFactory& make,
                            const ProcessGroup& group, const std::string& what,
                            bool small_buckets) {
  if (!group) throw UsageError(what + ": the process group is null");
  if (!make) throw UsageError(what + ": there is no function that makes the optimizer");
  const std::vector<size_t> trained = trained_of(parameters, what);
  const bool cuts = may_cut(parameters, make);
  int64_t cap = std::numeric_limits<int64_t>::max();
  if (small_buckets) {
    if (!cuts)
      throw UsageError("strategy " + what +
                           ": the optimizer looks at whole parameters, of which a rank has "
                           "parts only",
                       "use strategy zero1 or ddp, or an optimizer that is elementwise");
    cap = small_cap(parameters);
  }
  std::vector<FlatUnit> units =
      cuts ? even_layout(parameters, buckets_of(parameters, trained, cap), group.size())
           : whole_layout(parameters, trained, group.size());
  return {std::move(parameters), std::move(units), group};
}

}  // namespace

std::vector<size_t> trained_of(const std::vector<at::Tensor>& parameters, const std::string& what) {
  std::vector<size_t> trained;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!parameter.defined() || parameter.layout() != at::kStrided)
      throw UsageError(what + ": parameter " + std::to_string(i) + " is not dense");
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second)
      throw UsageError(what + ": parameter " + std::to_string(i) + " is there twice",
                       "give each tensor once, also one that several layers share");
    if (parameter.requires_grad()) trained.push_back(i);
  }
  return trained;
}

ShardedOptimizer::ShardedOptimizer(std::vector<at::Tensor> parameters, const OptimizerFactory& make,
                                   const ProcessGroup& group, std::string what, bool small_buckets)
    : what_(std::move(what)),
      shards_(make_shards(std::move(parameters), make, group, what_, small_buckets)),
      optimizer_(make(shards_.parts())) {
  refuse_closure(*optimizer_, what_,
                 "looks at all parameters as one vector, of which a rank updates a part only");
  // Of a parameter that is frozen nothing is in shards: rank 0 has all of its state.
  spread_.spread = {group, shards_.parameters(), {}};
  for (size_t i = 0; i < shards_.parameters().size(); ++i) {
    const Part frozen{0, group.rank() == 0 ? shards_.parameters()[i].numel() : 0};
    spread_.spread.parts.push_back(shards_.has(i) ? shards_.part(group.rank(), i) : frozen);
    spread_.indices.push_back(shards_.has(i) ? i : SpreadOptimizer::kNone);
  }
}

void ShardedOptimizer::follow_parameters() {
  const std::vector<size_t> taken = shards_.take_values(what_);
  if (!taken.empty()) check_same_on_all(taken, shards_.group(), what_);
}

void ShardedOptimizer::take_gradients() {
  const c10::AutoGradMode no_grad(false);
  follow_parameters();
  const auto& parameters = shards_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kStrided)
      throw UsageError(what_ + ": the gradient of parameter " + std::to_string(i) +
                           " is sparse, and cannot be cut into parts",
                       "make it dense (sparse=false of an embedding), or use the strategy ddp");
    if (!shards_.has(i))
      throw UsageError(what_ + ": parameter " + std::to_string(i) +
                           " has a gradient, but was frozen when this was made",
                       "make it anew after parameters were unfrozen, or add them as a group");
    take_gradient(i, gradient);
  }
}

void ShardedOptimizer::take_gradient(size_t index, const at::Tensor& gradient) {
  const at::Tensor& part = shards_.parts()[index];
  if (part.numel() > 0) part.mutable_grad() = shards_.cut(index, gradient);
}

void ShardedOptimizer::update(const StepScale& scale) {
  follow_parameters();
  step_by(*optimizer_, scale);
}

void ShardedOptimizer::step(const StepScale& scale) {
  update(scale);
  shards_.share();
}

void ShardedOptimizer::drop_gradients() {
  for (const at::Tensor& part : shards_.parts()) part.mutable_grad().reset();
}

void ShardedOptimizer::load_state(const StateDict& whole) {
  auto [trained, frozen] = spread_.own_part(whole, optimizer_->name());
  optimizer_->load_state(trained);
  spread_.frozen = std::move(frozen);
}

}  // namespace lockstep::detail
