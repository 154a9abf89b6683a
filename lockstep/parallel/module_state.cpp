#include "lockstep/parallel/module_state.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::json;

bool has_sparse_gradient(const torch::nn::Module& module) {
  if (const auto* embedding = module.as<torch::nn::EmbeddingImpl>()) {
    return embedding->options.sparse();
  }
  if (const auto* bag = module.as<torch::nn::EmbeddingBagImpl>()) return bag->options.sparse();
  return false;
}

/// What must be alike on all ranks, in words.
std::vector<std::string> describe(const ModuleState& state) {
  std::vector<std::string> list;
  const auto add = [&](const std::string& kind, const NamedTensor& item) {
    const at::Tensor& tensor = item.tensor;
    list.push_back(kind + " '" + item.name + "' " + c10::toString(tensor.scalar_type()) + " " +
                   c10::str(tensor.sizes()) + " strides " + c10::str(tensor.strides()) +
                   (tensor.requires_grad() || kind == "buffer" ? "" : " (frozen)"));
  };
  for (const NamedTensor& item : state.parameters) add("parameter", item);
  for (const NamedTensor& item : state.buffers) add("buffer", item);
  return list;
}

/// What free_values leaves has one element in memory. A FullyShardedDataParallel that is gone
/// leaves none.
bool is_free(const at::Tensor& parameter) {
  if (parameter.layout() != at::kStrided || parameter.is_meta() || parameter.numel() == 0) {
    return false;
  }
  const auto strides = parameter.strides();
  return parameter.storage().nbytes() == 0 ||
         (parameter.numel() > 1 &&
          std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride == 0; }));
}

at::Tensor nan_like(const at::Tensor& parameter, at::IntArrayRef sizes) {
  const double value = parameter.is_floating_point() ? std::numeric_limits<double>::quiet_NaN() : 0;
  return at::full(sizes, value, at::dtype(parameter.scalar_type()).device(parameter.device()));
}

/// `unknown`: the names of `skip` that the module does not have.
ModuleState collect_state(torch::nn::Module& module, const std::set<std::string>& skip,
                          std::set<std::string>& unknown) {
  ModuleState state;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto take = [&](const std::string& name, const at::Tensor& tensor) {
    unknown.erase(name);
    return !skip.contains(name) && seen.insert(tensor.unsafeGetTensorImpl()).second;
  };
  const auto collect = [&](const std::string& prefix, const torch::nn::Module& part) {
    const bool sparse = has_sparse_gradient(part);
    for (auto& item : part.named_parameters(/*recurse=*/false)) {
      if (!take(prefix + item.key(), item.value())) continue;
      restore_memory(item.value());
      state.parameters.push_back({prefix + item.key(), item.value(), sparse});
      if (item.value().requires_grad()) state.reduced.push_back(state.parameters.back());
    }
    for (const auto& item : part.named_buffers(/*recurse=*/false)) {
      if (take(prefix + item.key(), item.value())) {
        state.buffers.push_back({prefix + item.key(), item.value()});
      }
    }
  };
  // LibTorch lists the module itself only where a shared pointer holds it.
  collect("", module);
  for (const auto& entry : module.named_modules("", /*include_self=*/false))
    collect(entry.key() + ".", *entry.value());
  return state;
}

}  // namespace

void restore_memory(const at::Tensor& parameter) {
  if (!is_free(parameter)) return;
  // Not by set_data: it counts as a use of what is gone.
  parameter.unsafeGetTensorImpl()->shallow_copy_from(
      nan_like(parameter, parameter.sizes()).getIntrusivePtr());
}

void free_values(at::Tensor parameter) {
  const c10::AutoGradMode no_grad(false);
  parameter.set_data(nan_like(parameter, {}).expand(parameter.sizes()));
}

ModuleState whole_module_state(torch::nn::Module& module) {
  std::set<std::string> unknown;
  return collect_state(module, {}, unknown);
}

ModuleState find_module_state(torch::nn::Module& module, const std::vector<std::string>& ignored,
                              const std::string& what) {
  const std::set<std::string> skip(ignored.begin(), ignored.end());
  std::set<std::string> unknown = skip;
  ModuleState state = collect_state(module, skip, unknown);
  if (!unknown.empty()) {
    throw UsageError("DdpOptions::ignored names '" + *unknown.begin() +
                     "', which is neither a parameter nor a buffer of the module");
  }
  if (state.reduced.empty()) {
    throw UsageError(what + ": the module has no parameter that needs a gradient",
                     "use the module as it is: there is nothing to average over ranks");
  }
  return state;
}

void check_same_state(const ModuleState& state, const ProcessGroup& group,
                      const std::string& what) {
  const std::vector<Json> all = group.all_gather_object(describe(state));
  const Json& first = all.front();
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const Json& other = all[rank];
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const auto text = [&](const Json& list) {
        return i < list.size() ? list[i].get<std::string>() : "nothing";
      };
      if (text(first) == text(other)) continue;
      throw MismatchError(
          what + ": the ranks have different modules; the first difference is at tensor " +
              std::to_string(i) + ": rank 0 has " + text(first) + ", rank " + std::to_string(rank) +
              " has " + text(other),
          "make the same module, with the same options, on every rank");
    }
  }
}

void start_alike(const ModuleState& state, const ProcessGroup& group, const std::string& what) {
  check_same_state(state, group, what);
  std::vector<at::Tensor> tensors;
  for (const auto* items : {&state.parameters, &state.buffers}) {
    for (const NamedTensor& item : *items) {
      if (!item.tensor.is_meta()) tensors.push_back(item.tensor.detach());
    }
  }
  broadcast_tensors(tensors, group);
}

void expect_kind(const std::string& place, const std::string& name, const at::Tensor& now,
                 at::ScalarType dtype, at::IntArrayRef sizes) {
  if (now.scalar_type() == dtype && now.sizes() == sizes) return;
  throw UsageError(place + ": parameter " + name + " is " + now.toString() + c10::str(now.sizes()) +
                       " now, and was " + c10::toString(dtype) + c10::str(sizes) +
                       " when this was made",
                   "convert the module first, then make this");
}

void check_same_on_all(const std::vector<size_t>& changed, const ProcessGroup& group,
                       const std::string& what) {
  const std::vector<Json> all = group.all_gather_object(changed);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    throw MismatchError(what +
                            ": the ranks have put values into different parameters: rank 0 into " +
                            all.front().dump() + ", rank " + std::to_string(rank) + " into " +
                            all[rank].dump() + ", by their numbers in the module",
                        "load the same file on every rank");
  }
}

void broadcast_tensors(const std::vector<at::Tensor>& tensors, const ProcessGroup& group, int src) {
  if (tensors.empty()) return;
  const c10::AutoGradMode no_grad(false);
  constexpr size_t kBytesAtOnce = 250 * 1024 * 1024;  // Python's.
  c10d::broadcast_coalesced(
      c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&group.native()),
      tensors, kBytesAtOnce, src);
}

void share_buffers(const torch::nn::Module& module, const ProcessGroup& group) {
  if (group.size() > 1) broadcast_tensors(module.buffers(), group);
}

}  // namespace lockstep::detail
