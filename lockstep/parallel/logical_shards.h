#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/strategy.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// The shards [begin, end) of a rank.
struct ShardRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

/// Which of `shards` a rank of `ranks` has: neighbours, and as many as any other, or one more.
/// Throws UsageError for more ranks than shards.
ShardRange shards_of_rank(int64_t shards, int rank, int ranks);

/// The same as a share of the data.
DataShare share_of(const ShardRange& own, int64_t shards);

/// What the bits of a result depend on besides the program: "LibTorch 2.11.0, AVX2, 1 thread".
/// That is of this process, as it is now.
std::string arithmetic_of_process();
/// As the system names it, such as "AMD EPYC 7763 64-Core Processor"; empty where it does not. A
/// library may choose other kernels on another one of the same instruction set.
std::string processor_model();

/// Data parallelism whose weights have the same bits at any number of ranks. The batch of a step
/// is cut into logical shards. Each is a forward and backward of its own, with random numbers that
/// depend on seed, step and shard. Gradients are summed over shards in a fixed binary tree.
///
///     LogicalShards shards(*model, world.group(), /*count=*/8, /*seed=*/1);
///     for (int64_t step = 0; step < steps; ++step) {
///       for (int64_t shard = shards.own().begin; shard < shards.own().end; ++shard)
///         shards.run(step, shard, [&] { return loss_of(model->forward(x(step, shard)), ...); });
///       clip_grad_norm(model->parameters(), 1.0);
///       optimizer.step();
///     }
///
/// A shard's samples must depend on the shard alone: DistributedSampler({.rank = shard,
/// .world_size = count}). For the same bits, LibTorch, its instruction set and its number of
/// threads must be the same, and so must what the program makes of the gradients.
///
/// Buffers: each shard begins with those of the step's beginning, and normalises by its own
/// statistics. A floating-point buffer then changes by the mean of its changes in all shards. Any
/// other buffer must change alike in all shards, as a count of batches does.
///
/// Every rank makes the same number of steps. Failures between ranks are CommErrors. One thread at
/// a time. Destroy it before the World closes.
class LogicalShards {
 public:
  /// The module must outlive it and keep its parameters. All ranks get rank 0's parameters and
  /// buffers. Throws MismatchError where ranks differ in these or in `arithmetic_of_process`, and
  /// UsageError for fewer shards than ranks. With `check_drift` `run` compares the ranks'
  /// parameters and buffers after the 2nd, 10th, 100th, ... step (MismatchError). A collective.
  LogicalShards(torch::nn::Module& module, const ProcessGroup& group, int64_t count, uint64_t seed,
                bool check_drift = true);
  ~LogicalShards();

  int64_t count() const;
  /// The shards that this rank runs.
  ShardRange own() const;

  /// Runs forward and backward of a batch of `shard`, which are called in their order, in each step
  /// all of this rank's. `loss` gives the mean over the batch. The first batch of the first shard
  /// drops the gradients that are there. After the last one gradients are the mean over all shards,
  /// on all ranks. A shard may have several batches, whose gradients add up: `last_of_shard` is
  /// false for all but the last. Throws UsageError for another shard and for a parameter without a
  /// gradient. After an exception a step begins anew with its first shard. The last call of a step
  /// is a collective; with one shard a rank, gradients are communicated while backward runs.
  void run(int64_t step, int64_t shard, const std::function<at::Tensor()>& loss,
           bool last_of_shard = true);

  /// The sum of one number for each shard, by the same tree, on all ranks. `of_own` has this
  /// rank's. A collective.
  double sum(const std::vector<double>& of_own) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Strategy ddp with StrategyOptions::logical_shards. Refuses optimizers that need a closure.
std::unique_ptr<Strategy> make_sharded_batch_strategy(const StrategySetup& setup);

}  // namespace lockstep
