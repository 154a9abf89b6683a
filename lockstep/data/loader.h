#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>

#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/transforms.h"

namespace lockstep {

struct LoaderOptions {
  int64_t batch_size = 32;  ///< Samples of this process in a batch; at least 1.
  /// Drops an epoch's last batch if it is not full. False as in Python.
  bool drop_last = false;
  /// Threads that prepare batches. 0: `next` prepares them itself. This is best for data in memory:
  /// to prepare a batch of MNIST costs less than to pass it between threads.
  int num_workers = 0;
  int prefetch = 2;  ///< Batches prepared ahead for each worker. 2 as in Python; at least 1.
  /// Batches in page-locked memory, for copies to a CUDA device that overlap with work. Throws
  /// UsageError where there is no CUDA device.
  bool pin_memory = false;
  /// Seed of random transforms, the same on all ranks. The order of samples has the sampler's own
  /// seed.
  uint64_t seed = 0;
};

/// One batch. Its tensors are the program's: the loader does not write to them any more.
struct Batch {
  at::Tensor data;      ///< [B, ...] on the CPU, of the transforms' output dtype.
  at::Tensor target;    ///< [B] int64 or [B, K] float32, as the dataset has them.
  int64_t index = 0;    ///< Index in the epoch, from 0; also counts batches before a resume.
  int64_t padding = 0;  ///< How many of the last rows are the sampler's padding.

  int64_t size() const { return target.size(0); }
};

/// Gives an epoch's batches in the sampler's order. The same options, seeds and epoch give the same
/// bits, with any number of workers and after a resume in the middle of an epoch.
///
///   DataLoader loader(splits.train, DistributedSampler({...}), {normalize(), flatten()}, {...});
///   for (int64_t epoch = 0; epoch < epochs; ++epoch)
///     for (const Batch& batch : loader.epoch(epoch)) ...
///
/// Only one thread at a time may use a loader. If a worker throws, the `next` for its batch
/// rethrows. The destructor and a new epoch stop and join the workers.
class DataLoader {
 public:
  /// Throws UsageError if the sampler is for a dataset of another size, an option is out of range,
  /// or the transforms do not fit. Also throws if there is no batch at all, for example with
  /// drop_last and a batch larger than this rank's data. Without drop_last that gives one short
  /// batch. Where the sampler skips samples there may be none.
  DataLoader(TensorDataset dataset, DistributedSampler sampler, Compose transforms = {},
             LoaderOptions options = {});
  DataLoader(std::unique_ptr<SampleSource> source, DistributedSampler sampler,
             Compose transforms = {}, LoaderOptions options = {});
  ~DataLoader();
  DataLoader(DataLoader&&) noexcept;
  DataLoader& operator=(DataLoader&&) noexcept;

  class Epoch;
  /// Starts an epoch at a batch in [0, batches_per_epoch()] and ends the one in progress. Use the
  /// result in a range-based for loop, or ignore it and call `next`.
  Epoch epoch(int64_t epoch, int64_t first_batch = 0);
  /// Starts at the position of a loader with the same options when it gave this state. Throws
  /// UsageError if the position is not at the start of a batch.
  Epoch resume(const SamplerState& state);
  /// From now on so many samples at the beginning of an epoch's order are done, as with
  /// SamplerOptions::skip. 0: none is. Ends the epoch in progress.
  void skip(int64_t samples);
  /// The next batch. False, with an empty batch, at the epoch's end or before the first epoch.
  bool next(Batch& batch);

  /// The position after the last batch that `next` gave. Prefetched batches do not count.
  SamplerState state() const;
  int64_t batches_per_epoch() const;
  /// Samples of this rank in an epoch: the sampler's, without those that drop_last drops.
  int64_t samples_per_epoch() const;
  /// Shape and dtype of one row of Batch::data.
  const SampleSpec& data_spec() const;
  const SampleSpec& target_spec() const;
  const DistributedSampler& sampler() const;
  const LoaderOptions& options() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// The remaining batches of an epoch, for one pass. Refers to its loader, which must outlive it.
class DataLoader::Epoch {
 public:
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    Batch& operator*() const { return *batch_; }
    Batch* operator->() const { return batch_; }
    Iterator& operator++() {
      if (!loader_->next(*batch_)) loader_ = nullptr;
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return loader_ == nullptr; }

   private:
    friend class Epoch;
    Iterator(DataLoader* loader, Batch* batch) : loader_(loader), batch_(batch) { ++*this; }
    DataLoader* loader_;
    Batch* batch_;
  };

  Iterator begin() { return Iterator(loader_, &batch_); }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend class DataLoader;
  explicit Epoch(DataLoader* loader) : loader_(loader) {}
  DataLoader* loader_;
  Batch batch_;
};

}  // namespace lockstep
