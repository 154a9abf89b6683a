#pragma once

#include <concepts>
#include <cstdint>
#include <vector>

namespace lockstep {

/// A number of samples. Any integer converts to it without a warning, including `size_t`. A value
/// that does not fit in int64_t becomes negative.
class SampleCount {
 public:
  SampleCount() = default;
  template <std::integral T>
  SampleCount(T count)  // NOLINT(google-explicit-constructor): sizes are written without a cast.
      : count_(static_cast<int64_t>(count)) {}
  operator int64_t() const { return count_; }  // NOLINT(google-explicit-constructor): likewise.

 private:
  int64_t count_ = 0;
};

struct SamplerOptions {
  SampleCount dataset_size = 0;  ///< Samples in the whole dataset; at least 1.
  int rank = 0;                  ///< This process, in [0, world_size).
  int world_size = 1;            ///< Processes that share an epoch. 1: all samples are this one's.
  /// A new order every epoch, as training needs. Evaluation sets false.
  bool shuffle = true;
  /// The same on every rank, else ranks would draw overlapping parts. 0 as in Python.
  uint64_t seed = 0;
  /// True: the last dataset_size % world_size samples of an epoch's order are dropped. False: the
  /// first samples are repeated, so that all ranks have the same number.
  bool drop_last = false;
  /// So many samples at the beginning of an epoch's order are done, and no rank gets them. 0: none
  /// is. As many as there are, or more: all are. Where the number of ranks has changed within an
  /// epoch, what is left is shared anew.
  SampleCount skip = 0;
};

/// A rank's position in its data: it has used `position` of its samples of `epoch`. Save it in a
/// checkpoint. It is valid for a sampler with the same options.
struct SamplerState {
  int64_t epoch = 0;
  int64_t position = 0;
  bool operator==(const SamplerState&) const = default;
};

/// Which samples a rank sees in an epoch, and in which order: exactly the indices that Python's
/// `torch.utils.data.distributed.DistributedSampler` gives after `set_epoch(epoch)`.
///
/// It holds only its options. The epoch is an argument, so a program cannot forget to set it. Const
/// functions may be called from several threads.
class DistributedSampler {
 public:
  /// Throws UsageError for an empty dataset, a rank outside the world, or a negative `skip`.
  explicit DistributedSampler(SamplerOptions options);

  /// This rank's samples_per_rank() indices in [0, dataset_size).
  std::vector<int64_t> indices(int64_t epoch) const;
  /// The indices that remain after the first `state.position`. Throws UsageError when the position
  /// is not in [0, samples_per_rank()].
  std::vector<int64_t> indices(const SamplerState& state) const;

  /// Samples of each rank in an epoch. 0 only with drop_last and fewer samples than ranks.
  int64_t samples_per_rank() const { return samples_per_rank_; }
  /// samples_per_rank() * world_size.
  int64_t total_size() const { return samples_per_rank_ * options_.world_size; }
  /// How many of this rank's last samples are padding: another rank, or this one, has seen them in
  /// the same epoch. An evaluation that leaves them out counts every sample exactly once.
  int64_t padding() const;
  const SamplerOptions& options() const { return options_; }

 private:
  SamplerOptions options_;
  int64_t samples_per_rank_ = 0;
};

}  // namespace lockstep
