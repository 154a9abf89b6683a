#include "lockstep/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

/// Rounds up for a positive divisor, as Python's math.ceil(a / b).
int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b > 0 ? 1 : 0);
}

void check(const SamplerOptions& options) {
  if (options.dataset_size < 1)
    throw UsageError("the sampler got a data set of " + std::to_string(options.dataset_size) +
                     " samples, expected at least 1");
  if (options.world_size < 1)
    throw UsageError("the sampler got a world of " + std::to_string(options.world_size) +
                     " ranks, expected at least 1");
  if (options.rank < 0 || options.rank >= options.world_size)
    throw UsageError("the sampler got rank " + std::to_string(options.rank) +
                     ", expected one from 0 to " + std::to_string(options.world_size - 1) +
                     " in a world of " + std::to_string(options.world_size));
  if (options.skip < 0)
    throw UsageError("the sampler is to skip " + std::to_string(options.skip) +
                     " samples, expected at least 0");
}

}  // namespace

DistributedSampler::DistributedSampler(SamplerOptions options) : options_(options) {
  check(options_);
  options_.skip = std::min<int64_t>(options_.skip, options_.dataset_size);
  const int64_t left = options_.dataset_size - options_.skip;
  const int64_t world = options_.world_size;
  samples_per_rank_ = options_.drop_last ? left / world : ceil_div(left, world);
}

std::vector<int64_t> DistributedSampler::indices(int64_t epoch) const {
  return indices(SamplerState{.epoch = epoch, .position = 0});
}

std::vector<int64_t> DistributedSampler::indices(const SamplerState& state) const {
  if (state.position < 0 || state.position > samples_per_rank_)
    throw UsageError("cannot resume at position " + std::to_string(state.position) + " of epoch " +
                     std::to_string(state.epoch) + ": a rank has " +
                     std::to_string(samples_per_rank_) + " samples an epoch");
  const int64_t size = options_.dataset_size;
  at::Tensor order;
  const int64_t* shuffled = nullptr;
  if (options_.shuffle) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(
        options_.seed + static_cast<uint64_t>(state.epoch));
    order = at::randperm(size, generator, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
    shuffled = order.const_data_ptr<int64_t>();
  }
  std::vector<int64_t> result;
  result.reserve(samples_per_rank_ - state.position);
  for (int64_t i = state.position; i < samples_per_rank_; ++i) {
    // Positions beyond the data set are the padding: its order once more, as often as needed.
    const int64_t position = (options_.skip + i * options_.world_size + options_.rank) % size;
    result.push_back(shuffled ? shuffled[position] : position);
  }
  return result;
}

int64_t DistributedSampler::padding() const {
  const int64_t left = options_.dataset_size - options_.skip;
  const int64_t own = ceil_div(left - options_.rank, options_.world_size);
  return std::max<int64_t>(0, samples_per_rank_ - std::max<int64_t>(0, own));
}

}  // namespace lockstep
