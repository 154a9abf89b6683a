#include "lockstep/data/torch_dataset.h"

#include <ATen/ops/tensor.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep {

void TorchSampler::begin(int64_t epoch) {
  indices_ = sampler_.indices(epoch);
  epoch_ = epoch;
  position_ = 0;
}

void TorchSampler::reset(std::optional<size_t> new_size) {
  if (new_size) {
    SamplerOptions options = sampler_.options();
    options.dataset_size = *new_size;
    sampler_ = DistributedSampler(options);
  }
  begin(epoch_ + 1);
}

std::optional<std::vector<size_t>> TorchSampler::next(size_t batch_size) {
  if (epoch_ < 0) begin(0);
  const size_t end = std::min(indices_.size(), position_ + batch_size);
  if (position_ >= end) return std::nullopt;
  const auto at = [this](size_t index) { return indices_.begin() + static_cast<ptrdiff_t>(index); };
  std::vector<size_t> batch(at(position_), at(end));
  position_ = end;
  return batch;
}

void TorchSampler::set_epoch(int64_t epoch) {
  if (epoch < 0)
    throw UsageError("the sampler got epoch " + std::to_string(epoch) + ", expected 0 or more");
  epoch_ = epoch - 1;
  indices_.clear();
  position_ = 0;
}

void TorchSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", at::tensor(epoch_), /*is_buffer=*/true);
  archive.write("position", at::tensor(static_cast<int64_t>(position_)), /*is_buffer=*/true);
}

void TorchSampler::load(torch::serialize::InputArchive& archive) {
  at::Tensor epoch, position;
  archive.read("epoch", epoch, /*is_buffer=*/true);
  archive.read("position", position, /*is_buffer=*/true);
  if (epoch.item<int64_t>() < 0) return set_epoch(0);
  begin(epoch.item<int64_t>());
  position_ = std::min(indices_.size(), static_cast<size_t>(position.item<int64_t>()));
}

}  // namespace lockstep
