#include "lockstep/parallel/fsdp/unit_plan.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"

namespace lockstep::detail {
namespace {

using torch::nn::Module;

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// Whether the children are named 0, 1, 2 and so on, as those of Sequential and ModuleList are.
bool has_numbered_children(const Module& module) {
  size_t next = 0;
  for (const auto& child : module.named_children()) {
    if (child.key() != std::to_string(next++)) return false;
  }
  return next > 0;
}

bool is_list(const Module& module) {
  return has_numbered_children(module) || module.as<torch::nn::Sequential>() != nullptr ||
         module.as<torch::nn::ModuleList>() != nullptr ||
         module.as<torch::nn::ModuleDict>() != nullptr;
}

bool is_big(const Module& module, int64_t min_elements) {
  int64_t elements = 0;
  for (const at::Tensor& parameter : module.parameters()) elements += parameter.numel();
  return elements >= min_elements;
}

/// Whether a list in it, or itself, holds two big modules or more.
bool has_big_list(const Module& module, int64_t min_elements) {
  const auto children = module.children();
  if (is_list(module) && std::count_if(children.begin(), children.end(), [&](const auto& child) {
                           return is_big(*child, min_elements);
                         }) >= 2)
    return true;
  return std::any_of(children.begin(), children.end(), [&](const auto& child) {
    return is_big(*child, min_elements) && has_big_list(*child, min_elements);
  });
}

/// The full names that a list of names and "NAME.*" stands for.
std::unordered_set<std::string> expand(const Module& module,
                                       const std::vector<std::string>& names) {
  std::vector<std::string> all;
  for (const auto& entry : module.named_modules("", /*include_self=*/false))
    all.push_back(entry.key());
  std::unordered_set<std::string> units;
  for (const std::string& name : names) {
    const bool children = name == "*" || name.ends_with(".*");
    const std::string prefix = children ? name.substr(0, name.size() - 1) : "";
    bool found = false;
    for (const std::string& known : all) {
      const bool is_child = children && known.starts_with(prefix) &&
                            known.find('.', prefix.size()) == std::string::npos;
      if (!is_child && known != name) continue;
      found = true;
      units.insert(known);
    }
    if (!found)
      throw UsageError("FsdpOptions::units: " + unknown_word("module", name, all),
                       "give full names as named_modules() has them, or \"NAME.*\" for all "
                       "children of NAME");
  }
  return units;
}

}  // namespace

std::vector<FlatUnit> lay_out(const std::vector<PlannedUnit>& planned,
                              const torch::nn::Module& module, int ranks) {
  // LibTorch lists a tied parameter once for each of its names.
  std::unordered_map<const c10::TensorImpl*, size_t> indices;
  for (const at::Tensor& parameter : module.parameters())
    indices.emplace(parameter.unsafeGetTensorImpl(), indices.size());
  std::vector<FlatUnit> units;
  for (const PlannedUnit& plan : planned) {
    const size_t first = units.size();
    for (const NamedTensor& item : plan.parameters) {
      const at::ScalarType dtype = item.tensor.scalar_type();
      auto unit = std::find_if(units.begin() + static_cast<std::ptrdiff_t>(first), units.end(),
                               [&](const FlatUnit& made) { return made.dtype == dtype; });
      if (unit == units.end()) unit = units.insert(units.end(), {plan.name, dtype, {}});
      unit->add(item.name, item.tensor, indices.at(item.tensor.unsafeGetTensorImpl()));
    }
  }
  for (FlatUnit& unit : units) unit.cut_evenly(ranks, /*spare=*/1);
  return units;
}

std::vector<PlannedUnit> plan_units(const Module& module, const std::vector<std::string>& names,
                                    int64_t min_elements) {
  const auto named = expand(module, names);
  std::vector<PlannedUnit> units(1);
  std::unordered_set<const c10::TensorImpl*> seen;
  // By size a unit is not cut further.
  const auto is_unit = [&](const std::string& name, const Module& part, size_t within) {
    if (!names.empty()) return named.contains(name);
    return within == 0 && is_big(part, min_elements) && !has_big_list(part, min_elements);
  };
  // All parameters below go to `unit`, except those of modules that are units themselves.
  const std::function<void(const Module&, const std::string&, size_t)> take =
      [&](const Module& part, const std::string& name, size_t unit) {
        for (const auto& item : part.named_parameters(/*recurse=*/false)) {
          if (seen.insert(item.value().unsafeGetTensorImpl()).second)
            units[unit].parameters.push_back({joined(name, item.key()), item.value()});
        }
        for (const auto& child : part.named_children()) {
          const std::string child_name = joined(name, child.key());
          const bool own = is_unit(child_name, *child.value(), unit);
          if (own) units.push_back({child_name, {}});
          take(*child.value(), child_name, own ? units.size() - 1 : unit);
        }
      };
  take(module, "", 0);
  std::erase_if(units, [](const PlannedUnit& unit) { return unit.parameters.empty(); });
  return units;
}

}  // namespace lockstep::detail
