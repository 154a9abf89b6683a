#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <ATen/Functions.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lockstep/autograd/recorded_state.h"
#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {
namespace {

namespace autograd = torch::autograd;
using torch::nn::Module;

/// Buffers up to this size are copied before each forward. What LibTorch's batch norm writes into
/// its running statistics does not count as a change of the tensor.
constexpr size_t kSmallBuffer = 1 << 20;

void check_alike(const Module& module, const Module& copy) {
  const StateDict own = state_dict(module), others = state_dict(copy);
  const auto alike = [](const auto& a, const auto& b) {
    return a.first == b.first && a.second.sizes() == b.second.sizes() &&
           a.second.scalar_type() == b.second.scalar_type();
  };
  if (std::equal(own.begin(), own.end(), others.begin(), others.end(), alike)) return;
  throw UsageError("DataParallel: a copy of module " + module.name() +
                       " has tensors of other names, shapes or dtypes",
                   "make the copy with the options of the module");
}

/// Forward gives tensors that stand for a parameter in the replicas. Backward adds their gradients
/// up in the replicas' order.
class Replicate : public autograd::Function<Replicate> {
 public:
  static autograd::variable_list forward(autograd::AutogradContext* context,
                                         const at::Tensor& parameter, size_t replicas) {
    context->set_materialize_grads(false);
    autograd::variable_list copies;
    for (size_t i = 0; i < replicas; ++i) copies.push_back(parameter.variable_data());
    return copies;
  }

  static autograd::variable_list backward(autograd::AutogradContext*,
                                          autograd::variable_list gradients) {
    at::Tensor sum;
    for (at::Tensor& gradient : gradients) add(sum, std::move(gradient));
    return {sum, at::Tensor()};  // The number of replicas has no gradient.
  }

 private:
  static void add(at::Tensor& sum, at::Tensor&& gradient) {
    if (!gradient.defined()) return;
    if (!sum.defined()) {
      sum = std::move(gradient);
      return;
    }
    if (gradient.device() != sum.device()) gradient = gradient.to(sum.device());
    if (is_ours_to_write(sum)) {
      sum.add_(gradient);
    } else {
      sum = sum + gradient;
    }
  }

  /// Nobody else holds the tensor or its memory.
  static bool is_ours_to_write(const at::Tensor& tensor) {
    return !c10::GradMode::is_enabled() && tensor.layout() == at::kStrided &&
           tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
           tensor.is_non_overlapping_and_dense();
  }
};

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

void share(const at::Tensor& own, const at::Tensor& source) {
  if (same_memory(own, source)) return;
  own.set_data(source.variable_data());
  if (!source.is_inference())
    autograd::impl::set_version_counter(own, autograd::impl::version_counter(source));
}

/// True when values were copied.
bool bring_over(ReplicaSet::Own& own, const at::Tensor& source, bool always) {
  const bool counted = !source.is_inference() && !own.tensor.is_inference();
  if (!always && counted && own.source_version == source._version() &&
      own.own_version == own.tensor._version()) {
    return false;
  }
  if (own.tensor.sizes() == source.sizes() && own.tensor.scalar_type() == source.scalar_type()) {
    own.tensor.copy_(source, /*non_blocking=*/true);
  } else {
    own.tensor.set_data(source.variable_data().to(own.tensor.device(), /*non_blocking=*/false,
                                                  /*copy=*/true));
  }
  if (counted) {
    own.source_version = source._version();
    own.own_version = own.tensor._version();
  }
  return true;
}

}  // namespace

std::shared_ptr<Module> copy_module(const std::shared_ptr<Module>& module, c10::Device device,
                                    const std::function<std::shared_ptr<Module>()>& make) {
  // `clone` draws initial values that nobody uses.
  const RecordedState::Replay keep(RecordedState::record({}, /*random=*/true));
  const c10::AutoGradMode no_grad(false);
  std::shared_ptr<Module> copy;
  if (make) {
    copy = make();
    if (!copy || copy == module) {
      throw UsageError("DataParallel: the function that makes replicas gave no new module");
    }
    copy->to(device);
  } else {
    try {
      copy = module->clone(device);
    } catch (const c10::Error& error) {
      throw UsageError(
          "DataParallel: module " + module->name() +
              " cannot be copied: " + error.what_without_backtrace(),
          "derive it from torch::nn::Cloneable and register its members in reset(), or "
          "give DataParallel a function that makes such a module");
    }
  }
  check_alike(*module, *copy);
  return copy;
}

ReplicaSet::ReplicaSet(std::shared_ptr<Module> module,
                       std::vector<std::shared_ptr<Module>> replicas)
    : module_(std::move(module)), replicas_(std::move(replicas)) {
  for (const at::Tensor& tensor : module_->parameters()) rows_.push_back({tensor, false});
  for (const at::Tensor& tensor : module_->buffers()) rows_.push_back({tensor, true});
  for (const auto& replica : replicas_) {
    // They are no leaves: they need a gradient when they are linked.
    for (at::Tensor& parameter : replica->parameters()) parameter.requires_grad_(false);
    size_t next = 0;
    for (const auto& tensors : {replica->parameters(), replica->buffers()}) {
      for (const at::Tensor& tensor : tensors) rows_[next++].own.push_back({tensor});
    }
  }
}

void ReplicaSet::refresh(size_t count, bool link) {
  for (Row& row : rows_) {
    const c10::AutoGradMode no_grad(false);
    const bool always = row.is_buffer && row.source.nbytes() <= kSmallBuffer;
    for (size_t i = 0; i < count; ++i) {
      Own& own = row.own[i];
      if (own.tensor.grad_fn()) autograd::impl::set_gradient_edge(own.tensor, {});
      if (own.tensor.device() == row.source.device() && (!row.is_buffer || i == 0)) {
        share(own.tensor, row.source);
      } else {
        copies_ += bring_over(own, row.source, always);
      }
    }
  }
  const auto from = module_->modules();
  for (size_t i = 0; i < count; ++i) {
    const auto to = replicas_[i]->modules();
    for (size_t m = 0; m < std::min(from.size(), to.size()); ++m) {
      if (to[m]->is_training() != from[m]->is_training()) to[m]->train(from[m]->is_training());
    }
  }
  for (const Row& row : rows_) {
    if (!link || row.is_buffer || !row.source.requires_grad()) continue;
    const auto stand_for = Replicate::apply(row.source, count);
    for (size_t i = 0; i < count; ++i) {
      autograd::impl::set_gradient_edge(row.own[i].tensor,
                                        autograd::impl::gradient_edge(stand_for[i]));
    }
  }
}

namespace {

/// How many devices get something. A tensor without dimensions goes to each device.
size_t common_parts(const std::vector<at::Tensor>& tensors,
                    const std::vector<std::vector<at::Tensor>>& chunks, size_t devices) {
  const at::Tensor* first = nullptr;
  size_t count = devices;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].dim() == 0) continue;
    if (first == nullptr) {
      first = &tensors[i];
      count = chunks[i].size();
    } else if (chunks[i].size() != count) {
      throw UsageError("scatter: a tensor of shape " + c10::str(first->sizes()) + " gives " +
                           counted(static_cast<int64_t>(count), "part") +
                           " for the devices, one of shape " + c10::str(tensors[i].sizes()) +
                           " gives " + std::to_string(chunks[i].size()),
                       "all tensors that are scattered have as many rows as there are samples; "
                       "what is not a sample's belongs into the module");
    }
  }
  return count;
}

at::Tensor gather_tensor(std::vector<at::Tensor> parts, c10::Device device, int64_t dim) {
  const bool scalars =
      std::ranges::all_of(parts, [](const at::Tensor& part) { return part.dim() == 0; });
  for (at::Tensor& part : parts) {
    part = part.to(device);
    if (scalars) part = part.reshape({1});
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts, scalars ? 0 : dim);
}

}  // namespace

std::vector<std::vector<at::Tensor>> scatter_tensors(const std::vector<at::Tensor>& tensors,
                                                     const std::vector<c10::Device>& devices,
                                                     int64_t dim) {
  if (devices.empty()) throw UsageError("scatter: there are no devices");
  const auto count = static_cast<int64_t>(devices.size());
  std::vector<std::vector<at::Tensor>> chunks;
  for (const at::Tensor& tensor : tensors) {
    chunks.push_back(tensor.dim() == 0 ? std::vector<at::Tensor>(devices.size(), tensor)
                                       : tensor.chunk(count, dim));
  }
  std::vector<std::vector<at::Tensor>> parts(common_parts(tensors, chunks, devices.size()));
  for (size_t i = 0; i < parts.size(); ++i) {
    for (const auto& of_tensor : chunks)
      parts[i].push_back(of_tensor[i].to(devices[i], /*non_blocking=*/true));
  }
  return parts;
}

std::vector<at::Tensor> gather_tensors(const std::vector<std::vector<at::Tensor>>& of_replicas,
                                       c10::Device device, int64_t dim) {
  if (of_replicas.empty()) throw UsageError("gather: there are no outputs");
  const size_t count = of_replicas.front().size();
  for (size_t i = 1; i < of_replicas.size(); ++i) {
    if (of_replicas[i].size() == count) continue;
    throw UsageError("gather: replica 0 gave " + counted(static_cast<int64_t>(count), "tensor") +
                         ", replica " + std::to_string(i) + " gave " +
                         std::to_string(of_replicas[i].size()),
                     "make forward return the same tensors whatever the samples are");
  }
  std::vector<at::Tensor> joined;
  for (size_t t = 0; t < count; ++t) {
    std::vector<at::Tensor> parts;
    for (const auto& tensors : of_replicas) parts.push_back(tensors[t]);
    joined.push_back(gather_tensor(std::move(parts), device, dim));
  }
  return joined;
}

void throw_other_keys(size_t replica) {
  throw UsageError("gather: the maps that replica 0 and replica " + std::to_string(replica) +
                       " returned have different keys",
                   "make forward return the same keys whatever the samples are");
}

}  // namespace lockstep::detail
