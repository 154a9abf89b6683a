#include "lockstep/parallel/data_parallel/replicate.h"

#include <ATen/ops/cat.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"

namespace lockstep::detail {

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
  return at::cat(moved, scalars ? 0 : dim);
}

}  // namespace lockstep::detail
