#include "lockstep/parallel/sharded_clip.h"

#include <ATen/Functions.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/optim/clip.h"

namespace lockstep::detail {

double clip_shards(const std::vector<at::Tensor>& gradients, double max_norm,
                   const ProcessGroup& group) {
  const auto device = group.native().getBoundDeviceId().value_or(c10::Device(c10::kCPU));
  return clip_gradients(gradients, max_norm, [&](const auto& norms, const auto&) {
    at::Tensor sum = at::zeros({1}, at::dtype(at::kDouble).device(device));
    for (const at::Tensor& norm : norms) sum += norm.to(device, at::kDouble).square();
    if (group.size() > 1) group.all_reduce(sum);
    return sum.sqrt().squeeze();
  });
}

}  // namespace lockstep::detail
