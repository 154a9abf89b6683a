#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <ATen/Functions.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>

#include "lockstep/autograd/recorded_state.h"
#include "lockstep/base/error.h"
#include "lockstep/base/words.h"

namespace lockstep::detail {
namespace {

namespace autograd = torch::autograd;
using torch::nn::Module;

/// Buffers up to this size are copied before each forward. What LibTorch's batch norm writes into
/// its running statistics does not count as a change of the tensor.
constexpr size_t kSmallBuffer = 1 << 20;

void check_alike(const Module& module, const Module& copy) {
  const StateDict own = named_tensors(module), others = named_tensors(copy);
  const auto alike = [](const auto& a, const auto& b) {
    return a.first == b.first && a.second.sizes() == b.second.sizes() &&
           a.second.scalar_type() == b.second.scalar_type();
  };
  if (std::equal(own.begin(), own.end(), others.begin(), others.end(), alike)) return;
  throw UsageError("DataParallel: a copy of module " + module.name() +
                       " has tensors of other names, shapes or dtypes",
                   "make the copy with the options of the module");
}

/// The values of parameters for replicas. Forward gives tensors that stand for the replicas'
/// parameters, replica after replica. Backward adds their gradients up in the replicas' order.
class Replicate : public autograd::Function<Replicate> {
 public:
  static autograd::variable_list forward(autograd::AutogradContext* context, int64_t replicas,
                                         at::TensorList parameters) {
    context->set_materialize_grads(false);
    context->saved_data["parameters"] = static_cast<int64_t>(parameters.size());
    autograd::variable_list copies;
    for (int64_t i = 0; i < replicas; ++i) {
      for (const at::Tensor& parameter : parameters) copies.push_back(parameter.variable_data());
    }
    return copies;
  }

  static autograd::variable_list backward(autograd::AutogradContext* context,
                                          autograd::variable_list gradients) {
    const auto parameters = static_cast<size_t>(context->saved_data["parameters"].toInt());
    autograd::variable_list sums(parameters + 1);  // The number of replicas has no gradient.
    for (size_t i = 0; i < gradients.size(); ++i) {
      add(sums[1 + i % parameters], std::move(gradients[i]));
    }
    return sums;
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

/// A tensor of a replica and what it was made equal to.
struct Own {
  at::Tensor tensor;
  bool shares = false;
  int64_t source_version = -1;  ///< Nothing was copied yet.
  int64_t own_version = 0;
};

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

void share(Own& own, const at::Tensor& source) {
  own.shares = true;
  if (same_memory(own.tensor, source)) return;
  own.tensor.set_data(source.variable_data());
  if (!source.is_inference()) {
    autograd::impl::set_version_counter(own.tensor, autograd::impl::version_counter(source));
  }
}

/// True when values were copied.
bool bring_over(Own& own, const at::Tensor& source, bool always) {
  const bool counted = !source.is_inference() && !own.tensor.is_inference();
  if (!always && counted && !own.shares && own.source_version == source._version() &&
      own.own_version == own.tensor._version()) {
    return false;
  }
  const bool is_new = own.shares || own.tensor.sizes() != source.sizes() ||
                      own.tensor.scalar_type() != source.scalar_type();
  if (is_new) {
    own.tensor.set_data(source.variable_data().to(own.tensor.device(), /*non_blocking=*/false,
                                                  /*copy=*/true));
  } else {
    own.tensor.copy_(source, /*non_blocking=*/true);
  }
  own.shares = false;
  if (counted) {
    own.source_version = source._version();
    own.own_version = own.tensor._version();
  }
  return true;
}

}  // namespace

StateDict named_tensors(const Module& module) {
  StateDict all;
  for (const auto& item : module.named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) all.emplace_back(item.key(), item.value());
  return all;
}

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

struct ReplicaSet::Row {
  at::Tensor source;
  bool is_buffer = false;
  size_t parameter = 0;  ///< Which of the parameters, each counted once. None of a buffer.
  std::vector<Own> own;  ///< By replica.
};

void ReplicaSet::find_rows() {
  std::unordered_map<const c10::TensorImpl*, size_t> known;
  const size_t named_parameters = module_->named_parameters().size();
  for (const auto& [name, tensor] : named_tensors(*module_)) {
    const bool is_buffer = rows_.size() >= named_parameters;
    Row row{.source = tensor, .is_buffer = is_buffer, .parameter = 0, .own = {}};
    if (!is_buffer) {
      const auto [place, is_new] = known.emplace(tensor.unsafeGetTensorImpl(), parameters_.size());
      if (is_new) parameters_.push_back(tensor);
      row.parameter = place->second;
    }
    rows_.push_back(std::move(row));
  }
  for (const auto& replica : replicas_) {
    size_t next = 0;
    for (const auto& [name, tensor] : named_tensors(*replica)) {
      // A replica's parameters are no leaves: they need a gradient when they are linked.
      tensor.requires_grad_(false);
      rows_[next++].own.push_back({.tensor = tensor});
    }
  }
}

void ReplicaSet::refresh_tensors(size_t count) {
  const c10::AutoGradMode no_grad(false);
  for (Row& row : rows_) {
    for (size_t i = 0; i < count; ++i) {
      Own& own = row.own[i];
      if (own.tensor.grad_fn()) autograd::impl::set_gradient_edge(own.tensor, {});
      const bool here = own.tensor.device() == row.source.device();
      if (here && (!row.is_buffer || i == 0)) {
        share(own, row.source);
      } else {
        copies_ +=
            bring_over(own, row.source, row.is_buffer && row.source.nbytes() <= kSmallBuffer);
      }
    }
  }
}

void ReplicaSet::mirror_modes(size_t count) {
  const auto from = module_->modules();
  for (size_t i = 0; i < count; ++i) {
    const auto to = replicas_[i]->modules();
    for (size_t m = 0; m < std::min(from.size(), to.size()); ++m) {
      if (to[m]->is_training() != from[m]->is_training()) to[m]->train(from[m]->is_training());
    }
  }
}

void ReplicaSet::link_parameters(size_t count) {
  std::vector<at::Tensor> wanted;
  std::vector<size_t> place(parameters_.size());  ///< In `wanted`, from 1; 0: frozen.
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (!parameters_[p].requires_grad()) continue;
    wanted.push_back(parameters_[p]);
    place[p] = wanted.size();
  }
  if (wanted.empty()) return;
  const auto copies_of = Replicate::apply(static_cast<int64_t>(count), at::TensorList(wanted));
  for (Row& row : rows_) {
    if (row.is_buffer || place[row.parameter] == 0) continue;
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor& stands_for = copies_of[i * wanted.size() + place[row.parameter] - 1];
      autograd::impl::set_gradient_edge(row.own[i].tensor,
                                        autograd::impl::gradient_edge(stands_for));
    }
  }
}

ReplicaSet::ReplicaSet(std::shared_ptr<Module> module,
                       std::vector<std::shared_ptr<Module>> replicas)
    : module_(std::move(module)), replicas_(std::move(replicas)) {
  find_rows();
}

ReplicaSet::~ReplicaSet() = default;
ReplicaSet::ReplicaSet(ReplicaSet&&) noexcept = default;
ReplicaSet& ReplicaSet::operator=(ReplicaSet&&) noexcept = default;

void ReplicaSet::refresh(size_t count, bool link) {
  refresh_tensors(count);
  mirror_modes(count);
  if (link) link_parameters(count);
}

std::vector<at::Tensor> scatter_tensor(const at::Tensor& tensor,
                                       const std::vector<c10::Device>& devices, int64_t dim) {
  if (devices.empty()) throw UsageError("scatter: there are no devices");
  const auto move = [](const at::Tensor& part, c10::Device device) {
    return part.device() == device ? part : part.to(device, /*non_blocking=*/true);
  };
  std::vector<at::Tensor> parts;
  if (tensor.dim() == 0) {
    for (const c10::Device device : devices) parts.push_back(move(tensor, device));
    return parts;
  }
  for (const at::Tensor& chunk : tensor.chunk(static_cast<int64_t>(devices.size()), dim)) {
    parts.push_back(move(chunk, devices[parts.size()]));
  }
  return parts;
}

size_t common_parts(const std::vector<at::Tensor>& tensors,
                    const std::vector<std::vector<at::Tensor>>& parts, size_t devices) {
  const at::Tensor* first = nullptr;
  size_t count = devices;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].dim() == 0) continue;
    if (first == nullptr) {
      first = &tensors[i];
      count = parts[i].size();
    } else if (parts[i].size() != count) {
      throw UsageError("scatter: a tensor of shape " + c10::str(first->sizes()) + " gives " +
                           counted(static_cast<int64_t>(count), "part") +
                           " for the devices, one of shape " + c10::str(tensors[i].sizes()) +
                           " gives " + std::to_string(parts[i].size()),
                       "all tensors that are scattered have as many rows as there are samples; "
                       "what is not a sample's belongs into the module");
    }
  }
  return count;
}

void check_gathered(const std::vector<std::vector<at::Tensor>>& tensors) {
  if (tensors.empty()) throw UsageError("gather: there are no outputs");
  for (size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].size() == tensors[0].size()) continue;
    throw UsageError("gather: replica 0 gave " +
                         counted(static_cast<int64_t>(tensors[0].size()), "tensor") + ", replica " +
                         std::to_string(i) + " gave " + std::to_string(tensors[i].size()),
                     "make forward return the same tensors whatever the samples are");
  }
}

void throw_other_keys(size_t replica) {
  throw UsageError("gather: the maps that replica 0 and replica " + std::to_string(replica) +
                       " returned have different keys",
                   "make forward return the same keys whatever the samples are");
}

at::Tensor gather_tensors(const std::vector<at::Tensor>& parts, c10::Device device, int64_t dim) {
  std::vector<at::Tensor> moved;
  moved.reserve(parts.size());
  const bool scalars =
      std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.dim() == 0; });
  for (const at::Tensor& part : parts) {
    const at::Tensor there =
        part.device() == device ? part : part.to(device, /*non_blocking=*/false);
    moved.push_back(scalars ? there.reshape({1}) : there);
  }
  return moved.size() == 1 ? moved.front() : at::cat(moved, scalars ? 0 : dim);
}

}  // namespace lockstep::detail
