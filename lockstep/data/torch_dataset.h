#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"

namespace lockstep {
namespace detail {

/// What a dataset gave for a list of indices: one tensor each.
struct Examples {
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> target;
};

/// The rows of a stacked batch. None of a tensor that has no rows.
std::vector<at::Tensor> rows_of(const at::Tensor& stacked);

/// A source that asks for examples one list at a time and copies them into the batch. Shapes and
/// dtypes are those of sample 0.
class ExampleSource : public SampleSource {
 public:
  std::string name() const override { return name_; }
  int64_t size() const override { return size_; }
  SampleSpec data_spec() const override { return data_spec_; }
  SampleSpec target_spec() const override { return target_spec_; }
  /// Throws DataError naming the sample whose shape or dtype is another than sample 0's.
  void read(std::span<const int64_t> indices, const at::Tensor& data,
            const at::Tensor& target) override;

 protected:
  explicit ExampleSource(std::string name) : name_(std::move(name)) {}
  /// Reads sample 0. Throws DataError for a dataset that has none.
  void inspect(int64_t size);
  virtual Examples fetch(const std::vector<size_t>& indices) = 0;

 private:
  std::string name_;
  int64_t size_ = 0;
  SampleSpec data_spec_;
  SampleSpec target_spec_;
};

template <typename Dataset>
class TorchDatasetSource : public ExampleSource {
 public:
  static_assert(!std::is_same_v<typename Dataset::BatchRequestType, size_t>,
                "a stream has no indices to sample from: give a data set with get(index)");
  static_assert(!Dataset::is_stateful,
                "a stateful data set yields its batches in an order of its own: give one with "
                "get(index)");
  static_assert(std::is_copy_constructible_v<Dataset>,
                "each worker has a copy of the data set: make it copyable, or wrap it by "
                "torch::data::datasets::make_shared_dataset");

  TorchDatasetSource(Dataset dataset, std::string name)
      : ExampleSource(std::move(name)), dataset_(std::move(dataset)) {
    inspect(static_cast<int64_t>(dataset_.size().value_or(0)));
  }
  std::unique_ptr<SampleSource> clone() const override {
    return std::make_unique<TorchDatasetSource>(*this);
  }

 protected:
  Examples fetch(const std::vector<size_t>& indices) override {
    auto batch = dataset_.get_batch(indices);
    if constexpr (requires { batch.data; }) {
      return {rows_of(batch.data), rows_of(batch.target)};
    } else {
      Examples examples;
      for (auto& example : batch) {
        examples.data.push_back(std::move(example.data));
        examples.target.push_back(std::move(example.target));
      }
      return examples;
    }
  }

 private:
  Dataset dataset_;
};

}  // namespace detail

/// Any `torch::data` dataset with random access as a source for a DataLoader: a `Dataset<Self,
/// Example<>>`, or one mapped by transforms, including `Stack<>`. The loader's threads read samples
/// when a batch needs them. Each thread has its own copy of the dataset, as in LibTorch's own
/// loader.
///
///   DataLoader loader(torch_source(MyDataset(folder), "mine"), sampler, {...}, {...});
template <typename Dataset>
std::unique_ptr<SampleSource> torch_source(Dataset dataset, std::string name = "torch::data") {
  return std::make_unique<detail::TorchDatasetSource<Dataset>>(std::move(dataset), std::move(name));
}

/// All samples of a `torch::data` dataset, read once into memory. If they fit, epochs after the
/// first one are faster.
template <typename Dataset>
TensorDataset load_torch_dataset(Dataset dataset, std::string name = "torch::data") {
  return read_all(*torch_source(std::move(dataset), std::move(name)));
}

}  // namespace lockstep

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

/// A rank's share of a dataset, for LibTorch's own loader. It has the interface that
/// `torch::data::make_data_loader` requires of a sampler. Its indices are those of
/// DistributedSampler, and so those of Python. Each pass over the loader is the next epoch. The
/// first is epoch 0.
///
/// LibTorch's DistributedRandomSampler repeats one order in every pass: the loader takes the
/// sampler by value, so a program cannot set its epoch.
///
/// One thread at a time, as the loader uses it. Each copy counts its own passes.
class TorchSampler {
 public:
  using BatchRequestType = std::vector<size_t>;

  /// Throws UsageError for an empty dataset, or a rank outside the world.
  explicit TorchSampler(SamplerOptions options) : sampler_(options) {}

  /// Begins the next epoch, as the loader's begin() does. `new_size` replaces the dataset's size.
  void reset(std::optional<size_t> new_size = std::nullopt);
  /// Up to `batch_size` of this rank's remaining indices. Empty at the end of the epoch. Begins
  /// epoch 0 if `reset` was not called before.
  std::optional<std::vector<size_t>> next(size_t batch_size);

  /// The epoch of the current pass; -1 before the first one.
  int64_t epoch() const { return epoch_; }
  /// Sets the epoch of the next pass, to resume from a checkpoint. Call it before the sampler is
  /// given to the loader.
  void set_epoch(int64_t epoch);
  /// Samples of each rank in an epoch, as DistributedSampler says.
  int64_t samples_per_rank() const { return sampler_.samples_per_rank(); }

  /// Save and load the position in the pass, as LibTorch's samplers do.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  void begin(int64_t epoch);

  DistributedSampler sampler_;
  int64_t epoch_ = -1;
  std::vector<int64_t> indices_;  ///< Of the epoch.
  size_t position_ = 0;
};

/// A type with a rank and a size: a World or a ProcessGroup.
template <class T>
concept RankOfSeveral = requires(const T& ranks) {
  { ranks.rank() } -> std::convertible_to<int>;
  { ranks.size() } -> std::convertible_to<int>;
};

/// A sampler of this rank's share of a dataset of `size` samples. `size` may be the result of the
/// dataset's size(). Throws UsageError when that is empty.
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
