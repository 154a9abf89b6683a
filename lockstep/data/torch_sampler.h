#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/data/sampler.h"

namespace torch::serialize {
class OutputArchive;
class InputArchive;
}  // namespace torch::serialize

namespace lockstep {

/// The defaults are those of SamplerOptions.
struct TorchSamplerOptions {
  bool shuffle = true;     ///< A new order every pass, as training needs. Evaluation sets false.
  uint64_t seed = 0;       ///< The same on every rank, else ranks would draw overlapping parts.
  bool drop_last = false;  ///< As SamplerOptions::drop_last.
};

/// A rank's share of a data set, for LibTorch's own loader. It has what
/// `torch::data::make_data_loader` asks of a sampler. Its indices are those of DistributedSampler,
/// and so Python's. Each pass over the loader is the next epoch: the first is epoch 0.
///
/// LibTorch's DistributedRandomSampler repeats one order in every pass: the loader takes the
/// sampler by value, so nobody can set its epoch.
///
/// One thread at a time, as the loader uses it. A copy counts its passes by itself.
class TorchSampler {
 public:
  using BatchRequestType = std::vector<size_t>;

  /// Throws UsageError for an empty data set, or a rank outside the world.
  explicit TorchSampler(SamplerOptions options) : sampler_(options) {}

  /// Begins the next epoch, as the loader's begin() does. `new_size` replaces the data set's size.
  void reset(std::optional<size_t> new_size = std::nullopt);
  /// Up to `batch_size` of what is left of this rank's indices. None at the end of the epoch.
  /// Without a `reset` before it begins epoch 0.
  std::optional<std::vector<size_t>> next(size_t batch_size);

  /// The epoch of the present pass. Before the first one -1.
  int64_t epoch() const { return epoch_; }
  /// The epoch of the next pass, to go on from a checkpoint. Call it before the loader gets this.
  void set_epoch(int64_t epoch);
  /// Samples of each rank in an epoch, as DistributedSampler says.
  int64_t samples_per_rank() const { return sampler_.samples_per_rank(); }

  /// Where the pass stands, as LibTorch's samplers save it.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  void begin(int64_t epoch);

  DistributedSampler sampler_;
  int64_t epoch_ = -1;
  std::vector<int64_t> indices_;  ///< Of the epoch.
  size_t position_ = 0;
};

/// What has a rank among several: a World or a ProcessGroup.
template <class T>
concept RankOfSeveral = requires(const T& ranks) {
  { ranks.rank() } -> std::convertible_to<int>;
  { ranks.size() } -> std::convertible_to<int>;
};

/// The share of this rank of `world` in a data set of `size` samples. `size` may be what the data
/// set's own size() gives. Throws UsageError when that says none.
///
///     auto data = torch::data::datasets::MNIST("mnist").map(torch::data::transforms::Stack<>());
///     auto sampler = lockstep::torch_sampler(data.size(), world);
///     auto loader = torch::data::make_data_loader(data, sampler, 64);
template <RankOfSeveral Ranks>
TorchSampler torch_sampler(std::optional<size_t> size, const Ranks& world,
                           const TorchSamplerOptions& options = {}) {
  return TorchSampler({.dataset_size = size.value_or(0),
                       .rank = world.rank(),
                       .world_size = world.size(),
                       .shuffle = options.shuffle,
                       .seed = options.seed,
                       .drop_last = options.drop_last});
}

}  // namespace lockstep
