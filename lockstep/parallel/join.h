#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

struct JoinOptions {
  /// False: nothing is done, for inputs that are known to be even. PyTorch's default is true.
  bool enable = true;
  /// All ranks throw once one of them has no inputs left. PyTorch's default.
  bool throw_on_early_termination = false;
  /// DistributedDataParallel divides gradients by the size of the group. False: by the number of
  /// ranks that still have inputs. PyTorch's default.
  bool divide_by_initial_world_size = true;
};

/// What a rank without inputs does for one Joinable while others go on.
class JoinHook {
 public:
  virtual ~JoinHook() = default;
  /// Once for each iteration of the others: makes the collective calls that theirs make.
  virtual void main_hook() {}
  /// Once, when no rank has inputs left. `is_last_joiner`: this rank was among the last to have
  /// some.
  virtual void post_hook(bool /*is_last_joiner*/) {}
};

/// The ranks that take part in an iteration: they tell each other while it runs.
class ActiveRanks {
 public:
  ActiveRanks(Work work, at::Tensor count) : work_(std::move(work)), count_(std::move(count)) {}
  /// How many there are. Blocks until all have told.
  int wait();

 private:
  Work work_;
  at::Tensor count_;
};

/// Something that makes collective calls in each iteration: DistributedDataParallel,
/// ZeroRedundancyOptimizer, or the user's own.
class Joinable {
 public:
  virtual ~Joinable() = default;
  /// Made at the start of a Join.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  virtual const ProcessGroup& join_process_group() const = 0;
  /// Whether a Join that is enabled has this now.
  bool joins() const { return join_ != nullptr; }

 private:
  friend class Join;
  const class Join* join_ = nullptr;
};

/// torch.distributed.algorithms.Join: training on inputs of which ranks have different numbers. A
/// rank that has no more goes on to make the others' collective calls, so that nothing hangs:
///
///     Join join({ddp, optimizer});
///     join.run([&] {
///       for (const auto& batch : my_batches) { ... ddp(batch.data) ... optimizer.step(); }
///     });
///
/// A rank that waits contributes zeros to DistributedDataParallel's gradients. Other than in Python
/// it gets the others' mean, so that ZeroRedundancyOptimizer updates its part from it. At the end
/// all have the parameters of the last rank that trained.
///
/// Batch norm over all ranks (SyncBatchNorm) needs as many inputs on every rank: those without run
/// no module, and the others' calls end with a MismatchError or TimeoutError.
///
/// All Joinables must have one group. They must outlive this. Destroying it takes them out.
class Join {
 public:
  /// Throws UsageError for no Joinable and for several groups.
  explicit Join(std::vector<std::reference_wrapper<Joinable>> joinables,
                const JoinOptions& options = {});
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// Runs `inputs`, this rank's loop, and then the hooks until all ranks are done. What `inputs`
  /// throws leaves at once. With `throw_on_early_termination` the ranks throw MismatchError.
  void run(const std::function<void()>& inputs);

  /// For a Joinable of the user's own: to be called in each iteration, before its collective calls.
  /// Tells ranks without inputs that this one has some. Only the first Joinable of a Join does so,
  /// and none outside of one.
  static std::optional<ActiveRanks> notify_join_context(Joinable& joinable);

 private:
  std::vector<std::reference_wrapper<Joinable>> joinables_;
  std::vector<std::unique_ptr<JoinHook>> hooks_;
  JoinOptions options_;
};

}  // namespace lockstep
