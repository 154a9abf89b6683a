#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/train/training_module.h"

namespace lockstep {

/// A loader of batches of type `B`, as a Trainer reads it. DataLoader is one. It gives the batches
/// of its rank's share of the data, the same number on every rank. For a resumed run to have the
/// same bits, the same epoch and first batch must give the same batches.
template <class L, class B>
concept BatchLoader = requires(L loader, const L& constant, B batch, int64_t number) {
  /// Starts an epoch (from 0) at one of its batches.
  loader.epoch(number, number);
  /// The next batch; false at the epoch's end.
  { loader.next(batch) } -> std::convertible_to<bool>;
  { constant.batches_per_epoch() } -> std::convertible_to<int64_t>;
};

/// What a Trainer is given: a loader, or with logical shards a vector of one for each of this
/// rank's shards, in their order.
template <class L, class B>
concept BatchLoaders = BatchLoader<L, B> ||
    (std::same_as<L, std::vector<typename L::value_type>>&& BatchLoader<typename L::value_type, B>);

namespace detail {

/// Loaders without their type, and their batches as the module wants them: on the device, and in
/// the dtype of its parameters. With logical shards each has a loader of its own, else there is
/// one. What is about batches is of the selected loader, at first the first.
class BatchFeed {
 public:
  virtual ~BatchFeed() = default;
  virtual int64_t batches_per_epoch() const = 0;
  /// Of all ranks together, in a batch that is full; 0 where the loader does not say.
  virtual int64_t samples_per_batch() const = 0;
  /// Starts all loaders.
  virtual void start(int64_t epoch, int64_t first_batch) = 0;
  /// From now on so many samples of an epoch's order are done: see DataLoader::skip. False where
  /// the loader cannot.
  virtual bool skip(int64_t samples) = 0;
  /// Takes the next batch; false at the epoch's end.
  virtual bool next() = 0;
  /// The same, less the sampler's padding. `has_samples` tells where nothing was left: then the
  /// batch is whole, so that all ranks make the same calls, but does not count.
  virtual bool next_without_padding() = 0;
  /// A batch for trying things out: zeros, or the first batch where the loader knows no shapes.
  virtual void take_example() = 0;
  /// The one that was taken last.
  virtual AnyBatch batch() const = 0;

  /// The input of a batch of zeros, of as many samples as the loader's batches have. For modules
  /// and loaders of Batch that know shapes; undefined for others.
  virtual at::Tensor example_input() const = 0;
  /// How the data is shared; null where the loader does not say.
  virtual const SamplerOptions* sampler() const = 0;

  virtual size_t shards() const = 0;
  void select(size_t shard) { selected_ = shard; }

  void move_to(c10::Device device) { device_ = device; }
  /// Floating-point tensors of the batches that the loader gives become of this dtype.
  void cast_to(at::ScalarType dtype) { dtype_ = dtype; }
  c10::Device device() const { return device_; }
  bool has_samples() const { return has_samples_; }

 protected:
  c10::Device device_ = c10::kCPU;
  bool has_samples_ = true;
  std::optional<at::ScalarType> dtype_;
  size_t selected_ = 0;
};

/// Throws UsageError for none.
void check_loaders(size_t count);

/// Zeros of so many samples.
Batch example_batch(const DataLoader& loader, int64_t samples = 2);
/// Gives whether any row is left; where none is, the batch stays as it is.
bool drop_padding(Batch& batch);

template <class B, class L>
class FeedOf : public BatchFeed {
 public:
  FeedOf(std::vector<L> loaders, std::shared_ptr<const TrainingModule<B>> module)
      : loaders_(std::move(loaders)), loaded_(loaders_.size()), module_(std::move(module)) {}

  size_t shards() const override { return loaders_.size(); }
  int64_t batches_per_epoch() const override {
    return static_cast<int64_t>(loader().batches_per_epoch());
  }
  int64_t samples_per_batch() const override {
    if constexpr (std::same_as<L, DataLoader>)
      return loader().options().batch_size * loader().sampler().options().world_size;
    return 0;
  }
  void start(int64_t epoch, int64_t first_batch) override {
    for (L& loader : loaders_) loader.epoch(epoch, first_batch);
  }

  bool skip(int64_t samples) override {
    if constexpr (std::same_as<L, DataLoader>) {
      for (L& loader : loaders_) loader.skip(samples);
    }
    return std::same_as<L, DataLoader>;
  }

  bool next() override {
    if (!load()) return false;
    prepare(loaded_[selected_]);
    return true;
  }

  bool next_without_padding() override {
    if (!load()) return false;
    if constexpr (std::same_as<B, Batch>) has_samples_ = drop_padding(loaded_[selected_]);
    prepare(loaded_[selected_]);
    return true;
  }

  void take_example() override {
    if constexpr (kKnowsShapes) {
      prepare(example_batch(loader()));
    } else {
      start(0, 0);
      next();
    }
  }

  AnyBatch batch() const override { return AnyBatch(batch_); }

  at::Tensor example_input() const override {
    if constexpr (kKnowsShapes) {
      const Batch zeros = example_batch(loader(), loader().options().batch_size);
      return module_->prepare_batch(zeros, device_).data;
    }
    return {};
  }

  const SamplerOptions* sampler() const override {
    if constexpr (std::same_as<L, DataLoader>) return &loaders_.front().sampler().options();
    return nullptr;
  }

 private:
  static constexpr bool kKnowsShapes = std::same_as<L, DataLoader> && std::same_as<B, Batch>;

  const L& loader() const { return loaders_[selected_]; }

  bool load() {
    batch_ = B{};  // lets the loader use its buffers again
    return loaders_[selected_].next(loaded_[selected_]);
  }

  void prepare(const B& loaded) {
    batch_ = module_->prepare_batch(loaded, device_);
    if constexpr (requires { BatchTraits<B>::cast(batch_, at::kFloat); }) {
      if (dtype_) BatchTraits<B>::cast(batch_, *dtype_);
    }
  }

  std::vector<L> loaders_;
  std::vector<B> loaded_;  ///< By each.
  std::shared_ptr<const TrainingModule<B>> module_;
  B batch_{};
};

template <class M, class L>
std::unique_ptr<BatchFeed> feed_of(const std::shared_ptr<M>& module, std::vector<L> loaders) {
  check_loaders(loaders.size());
  return std::make_unique<FeedOf<typename M::BatchType, L>>(std::move(loaders), module);
}

template <class M, class L>
std::unique_ptr<BatchFeed> feed_of(const std::shared_ptr<M>& module, L loader) {
  std::vector<L> loaders;
  loaders.push_back(std::move(loader));
  return feed_of(module, std::move(loaders));
}

/// What a fit works with.
struct TrainTask {
  std::shared_ptr<TrainingModuleBase> module;
  std::unique_ptr<BatchFeed> train;
  std::unique_ptr<BatchFeed> validation;  ///< Null: nothing is evaluated.
};

template <class M, class Train>
TrainTask train_task(const std::shared_ptr<M>& module, Train train) {
  return {module, feed_of(module, std::move(train)), nullptr};
}
template <class M, class Train, class Validation>
TrainTask train_task(const std::shared_ptr<M>& module, Train train, Validation validation) {
  return {module, feed_of(module, std::move(train)), feed_of(module, std::move(validation))};
}

}  // namespace detail
}  // namespace lockstep
