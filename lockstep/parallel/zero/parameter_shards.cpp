#include "lockstep/parallel/zero/parameter_shards.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>

#include "lockstep/base/call_origin.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/module_state.h"

namespace lockstep::detail {
namespace {

/// Where an all_gather writes to its output alone. LibTorch's Gloo gathers into a copy of the
/// whole, and MPI into one of each part. A broadcast is in place everywhere.
bool gathers_in_place(const ProcessGroup& group) {
  return group.backend() == "shm" || group.backend() == "nccl";
}

bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

FlatUnit unit_of(const std::vector<at::Tensor>& parameters, const std::vector<size_t>& members) {
  FlatUnit unit;
  for (const size_t index : members)
    unit.add("parameter " + std::to_string(index), parameters[index], index);
  unit.dtype = parameters[members.front()].scalar_type();
  return unit;
}

}  // namespace

ParameterShards::ParameterShards(std::vector<at::Tensor> parameters, std::vector<FlatUnit> units,
                                 ProcessGroup group)
    : parameters_(std::move(parameters)),
      units_(std::move(units)),
      places_(parameters_.size()),
      group_(std::move(group)),
      views_(parameters_.size()) {
  const c10::AutoGradMode no_grad(false);
  // Autograd need not know that they are views: it would forbid to change them in place.
  const at::AutoDispatchBelowADInplaceOrView untracked;
  for (size_t u = 0; u < units_.size(); ++u) {
    for (size_t i = 0; i < units_[u].parameters.size(); ++i)
      places_[units_[u].parameters[i].index] = {u, i};
  }
  for (const at::Tensor& parameter : parameters_) restore_memory(parameter);
  for (size_t unit = 0; unit < units_.size(); ++unit) move(unit);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Part mine = part(group_.rank(), i);
    const at::Tensor& parameter = parameters_[i];
    if (mine.numel() == 0) {
      parts_.push_back(at::empty({0}, parameter.options().requires_grad(false)));
      continue;
    }
    const at::Tensor& flat = flats_[unit(i)];
    parts_.push_back(
        mine.numel() == parameter.numel()
            ? flat.as_strided(parameter.sizes(), views_[i].strides(), views_[i].storage_offset())
            : flat.narrow(0, member(i).offset + mine.begin, mine.numel()));
    // An optimizer sees by it that somebody else has changed the parameter.
    const auto& versions = parameter.unsafeGetTensorImpl()->version_counter();
    parts_.back().unsafeGetTensorImpl()->set_version_counter(versions);
  }
}

Part ParameterShards::part(int rank, size_t parameter) const {
  return has(parameter) ? units_[unit(parameter)].part(rank, member(parameter)) : Part();
}

/// One parameter after the other, so that only one is there twice.
void ParameterShards::move(size_t unit) {
  const auto& members = units_[unit].parameters;
  const auto options = members.front().tensor.options().requires_grad(false);
  at::Tensor& flat = flats_.emplace_back(at::empty({units_[unit].length()}, options));
  int64_t end = 0;
  for (const FlatParameter& member : members) {
    at::Tensor& parameter = parameters_[member.index];
    flat.narrow(0, end, member.offset - end).zero_();
    end = member.offset + parameter.numel();
    at::Tensor& view = views_[member.index] = view_like(flat, member.offset, parameter);
    view.copy_(parameter.detach());
    parameter.set_data(view);
  }
  flat.narrow(0, end, flat.numel() - end).zero_();
}

std::vector<size_t> ParameterShards::take_values(const std::string& what) {
  const c10::AutoGradMode no_grad(false);
  std::vector<size_t> taken;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& parameter = parameters_[i];
    if (!has(i) || parameter.is_alias_of(views_[i])) continue;
    expect_kind(what, std::to_string(i), parameter, views_[i].scalar_type(), views_[i].sizes());
    views_[i].copy_(parameter.detach());
    parameter.set_data(views_[i]);
    parameter.unsafeGetTensorImpl()->bump_version();
    taken.push_back(i);
  }
  return taken;
}

at::Tensor ParameterShards::cut(size_t index, const at::Tensor& tensor) const {
  const at::Tensor& parameter = parameters_[index];
  const Part mine = part(group_.rank(), index);
  if (mine.numel() == parameter.numel()) return tensor;
  const at::AutoDispatchBelowADInplaceOrView untracked;
  return elements_like(tensor, parameter).narrow(0, mine.begin, mine.numel());
}

std::vector<Work> ParameterShards::share(const std::vector<size_t>& parameters) {
  const c10::AutoGradMode no_grad(false);
  std::vector<Work> works;
  for (const size_t index : parameters) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      const Part theirs = part(rank, index);
      if (theirs.numel() == 0) continue;
      at::Tensor values =
          flats_[unit(index)].narrow(0, member(index).offset + theirs.begin, theirs.numel());
      works.push_back(group_.broadcast_async(values, rank));
    }
    parameters_[index].unsafeGetTensorImpl()->bump_version();
  }
  return works;
}

void ParameterShards::share() {
  if (group_.size() > 1) {
    const c10::AutoGradMode no_grad(false);
    std::vector<Work> works;
    for (size_t i = 0; i < flats_.size(); ++i) {
      at::Tensor& flat = flats_[i];
      const CallOrigin origin("parameters", "ZeRO");
      const FlatUnit& unit = units_[i];
      const auto of_rank = [&](int rank) {
        return flat.narrow(0, unit.begin_of(rank), unit.begin_of(rank + 1) - unit.begin_of(rank));
      };
      if (gathers_in_place(group_) && unit.is_even()) {
        group_.all_gather_into_tensor(flat, of_rank(group_.rank()));
        continue;
      }
      for (int rank = 0; rank < group_.size(); ++rank) {
        at::Tensor part = of_rank(rank);
        if (part.numel() > 0) works.push_back(group_.broadcast_async(part, rank));
      }
    }
    for (const Work& work : works) work.wait();
  }
  // As every in-place operation does, so that autograd notices a use of the old values.
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has(i)) parameters_[i].unsafeGetTensorImpl()->bump_version();
  }
}

std::vector<std::vector<size_t>> buckets_of(const std::vector<at::Tensor>& parameters,
                                            const std::vector<size_t>& trained, int64_t cap) {
  struct Open {
    size_t bucket = 0;
    int64_t bytes = 0;
  };
  std::vector<std::vector<size_t>> buckets;
  std::vector<Open> open;
  for (const size_t index : trained) {
    const at::Tensor& parameter = parameters[index];
    const auto bytes = static_cast<int64_t>(parameter.nbytes());
    auto found = std::find_if(open.begin(), open.end(), [&](const Open& entry) {
      return alike(parameters[buckets[entry.bucket].front()], parameter);
    });
    const bool first = found == open.end();
    if (first) found = open.insert(open.end(), Open{});
    if (first || bytes > cap - found->bytes) {
      *found = {buckets.size(), 0};
      buckets.emplace_back();
    }
    buckets[found->bucket].push_back(index);
    found->bytes += bytes;
  }
  return buckets;
}

std::vector<FlatUnit> even_layout(const std::vector<at::Tensor>& parameters,
                                  const std::vector<std::vector<size_t>>& buckets, int ranks) {
  std::vector<FlatUnit> units;
  for (const auto& members : buckets)
    units.emplace_back(unit_of(parameters, members)).cut_evenly(ranks);
  return units;
}

std::vector<FlatUnit> whole_layout(const std::vector<at::Tensor>& parameters,
                                   const std::vector<size_t>& trained, int ranks) {
  std::vector<int64_t> sizes(static_cast<size_t>(ranks));
  std::vector<size_t> largest_first = trained;
  std::stable_sort(largest_first.begin(), largest_first.end(), [&](size_t a, size_t b) {
    return parameters[a].numel() > parameters[b].numel();
  });
  std::vector<size_t> owner(parameters.size());
  for (const size_t index : largest_first) {
    const auto least = std::min_element(sizes.begin(), sizes.end());
    owner[index] = static_cast<size_t>(least - sizes.begin());
    *least += parameters[index].numel();
  }
  std::vector<size_t> by_owner = trained;
  std::stable_sort(by_owner.begin(), by_owner.end(),
                   [&](size_t a, size_t b) { return owner[a] < owner[b]; });
  std::vector<FlatUnit> units;
  for (const auto& members :
       buckets_of(parameters, by_owner, std::numeric_limits<int64_t>::max())) {
    FlatUnit& unit = units.emplace_back(unit_of(parameters, members));
    for (size_t rank = 1, at = 0; rank <= sizes.size(); ++rank) {
      while (at < members.size() && owner[members[at]] < rank) ++at;
      unit.bounds.push_back(at < members.size() ? unit.parameters[at].offset : unit.end());
    }
  }
  return units;
}

}  // namespace lockstep::detail
