#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/fsdp/watched_memory.h"

namespace lockstep::detail {

/// Keeps the gradients of shards from being used while they only add up. An optimizer would else
/// find none, step without them, and nobody would know. Meanwhile each shard has a gradient without
/// values. What uses one throws UsageError.
class WithheldGradients final : private MemoryWatcher {
 public:
  /// `place` begins the error.
  WithheldGradients(std::vector<at::Tensor> shards, std::string place);
  ~WithheldGradients() override;

  void withhold();
  /// Gives the shards the gradients that they had. One whose gradient was dropped or replaced
  /// meanwhile keeps that.
  void release();

 private:
  struct Withheld {
    at::Tensor shard;
    at::Tensor before;  ///< The gradient that it had.
    at::Tensor stand_in;
  };
  void before_use(const std::vector<size_t>& memories) override;
  void after_use() noexcept override {}
  void before_write(size_t memory, const std::string& operation) override;

  std::string place_;
  std::vector<Withheld> all_;
  std::vector<WatchedMemory> memories_;
  bool withheld_ = false;
};

}  // namespace lockstep::detail
