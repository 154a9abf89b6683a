#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

class ProcessGroup;

/// What is done to a bucket of gradients before or instead of the all-reduce; Python's names.
/// `fp16_compress` and `bf16_compress` divide by the group's size, send half of the bytes and widen
/// again. bf16 keeps float32's range at 8 bits of precision. fp16 has 11 bits, but overflows at
/// 65504.
enum class CommHook { none, allreduce, fp16_compress, bf16_compress };

/// Gradients that are ready to be communicated: several parameters' in one flat buffer.
struct GradientBucket {
  at::Tensor gradients;                ///< One dimension; local, not divided. May be changed.
  std::vector<at::Tensor> parameters;  ///< Whose gradients they are, in the buffer's order.
  size_t index = 0;                    ///< In the order of reduction.
  bool is_last = false;                ///< Of this backward.
};

/// The user's own hook: what a bucket's gradients become, of the same shape (for DDP's meaning, the
/// mean over ranks). Called on the thread that runs backward, once per bucket, in the same order on
/// all ranks.
using GradientHook = std::function<at::Tensor(const ProcessGroup& group, GradientBucket& bucket)>;

/// The same in two parts, so that communication overlaps with the rest of backward. The hook starts
/// it and returns a function at once. That function is called at the end of backward for the
/// result.
using AsyncGradientHook =
    std::function<std::function<at::Tensor()>(const ProcessGroup& group, GradientBucket& bucket)>;

/// Python's DistributedDataParallel options, with its defaults unless a line says otherwise.
struct DdpOptions {
  double bucket_cap_mb = 25;   ///< Gradients per all-reduce, in MiB.
  double first_bucket_mb = 1;  ///< At most bucket_cap_mb; a small first one starts early.
  /// Parameters may get no gradient in a backward, other ones on each rank. They count as zeros.
  /// One that no rank has a gradient of is left alone. Costs a small all-reduce and overlap: what
  /// waits for them is reduced when backward ends.
  bool find_unused_parameters = false;
  /// The graph never changes: unused parameters are found once, re-entrant backward is allowed.
  bool static_graph = false;
  bool gradient_as_bucket_view = true;  ///< Python's is false. Saves one copy per step.
  bool broadcast_buffers = true;        ///< Rank 0's buffers go to all ranks before each forward.
  /// Check that the ranks' parameters match and broadcast rank 0's parameters and buffers.
  bool init_sync = true;
  CommHook comm_hook = CommHook::none;
  GradientHook custom_hook = {};             ///< Wins over `comm_hook`.
  AsyncGradientHook async_custom_hook = {};  ///< Wins over both.
  /// Full names of parameters and buffers that are left alone: neither broadcast nor reduced.
  std::vector<std::string> ignored = {};
  /// Compare the ranks' parameters after the 2nd, 10th, 100th, ... step: see
  /// DistributedDataParallel. Never with a hook of the user's own, and no longer after a Join.
  bool check_drift = true;
};

/// Of zero1 and zero2.
struct ZeroOptions {
  /// Sum gradients over ranks in this dtype: zero1 in float16 or bfloat16, as ddp's hooks do, zero2
  /// in any of floating point. Undefined: that of the gradients.
  std::optional<at::ScalarType> reduce_dtype = {};
};

/// Of FullyShardedDataParallel.
struct FsdpOptions {
  /// Full names of the modules that are gathered and freed as one unit ("layers.0"), or "h.*" for
  /// all children of h. Empty: by size, so that a transformer's blocks are units. A stage of a
  /// pipeline passes over names that it does not have.
  std::vector<std::string> units = {};
  /// By size: a module with fewer parameters is no unit of its own. 262,144 of float32 are 1 MiB:
  /// below that, what a gather costs by itself counts for more than its bytes.
  int64_t min_unit_elements = 262'144;
  /// Free a unit after its forward, too. Costs one more gather in backward.
  bool reshard_after_forward = true;
  /// Gather the unit to come while one computes. Costs the memory of one more unit.
  bool prefetch = true;
  /// Keep shards, their gradients and the optimizer's state in the host's memory while the module
  /// is on another device. On the CPU it changes nothing.
  bool cpu_offload = false;
  /// Gather and compute in this dtype. Shards keep the module's. Undefined: the module's.
  std::optional<at::ScalarType> parameter_dtype = {};
  /// Sum gradients over ranks in this dtype. Undefined: that of the gradients.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Over shared memory keep the whole parameters once per host, and gather nothing. Not with
  /// `parameter_dtype`: then each rank has its own copy in that dtype while it needs it.
  bool share_memory = true;
  /// Parameters without a gradient count as having zeros. Without it they are an error.
  bool find_unused_parameters = false;
  /// Rank 0's buffers go to all ranks before each forward, as with DistributedDataParallel.
  bool broadcast_buffers = true;
  /// Check that the ranks' modules match and take rank 0's values.
  bool init_sync = true;
};

/// Of a pipeline: see make_pipeline_strategy.
struct PipelineOptions {
  /// Parts of a batch. 4 keep two stages busy for 4/5 of the time.
  int64_t num_micro_batches = 4;
  /// gpipe, 1f1b, interleaved-1f1b or zero-bubble. 1f1b needs the least memory.
  std::string schedule = "1f1b";
  /// 0 is the schedule's own: 2 for interleaved-1f1b, else 1. More make the bubble smaller and
  /// messages more.
  int64_t stages_per_rank = 0;
  /// The layers at which the second and all further stages begin, by Layer::name. Empty: stages of
  /// equal cost.
  std::vector<std::string> plan = {};
  /// What makes stages of equal cost: "time" of their layers, measured where there is an
  /// example_input, or "parameters", which is alike in every run.
  std::string balance = "time";
  /// Keep only the inputs of stages, and run forward again in backward. It saves most of the
  /// activations' memory for a third more time.
  bool recompute_activations = false;
};

/// Of DataParallel, and of strategy dp.
struct DataParallelOptions {
  /// One device per replica; a device may be listed twice. Empty: for a module on the CPU one
  /// replica per core of the process, else all devices of the module's type.
  std::vector<c10::Device> devices = {};
  /// Without `devices`: the first so many of those. 0: all. On the CPU also more than cores.
  int64_t replicas = 0;
  std::optional<c10::Device> output_device = {};  ///< Where outputs are gathered. None: the first.
  int64_t dim = 0;                                ///< Along which inputs are cut.
  /// LibTorch threads per replica on the CPU. 0: an equal part of the constructing thread's number,
  /// at least 1. More threads in total than cores slow all of them down.
  int threads_per_replica = 0;
};

/// Of ddp, for the same bits at any number of ranks up to `count`: see LogicalShards.
struct LogicalShardsOptions {
  int64_t count = 0;  ///< Parts of a step's batch, at least one for each rank: none suits all.
  uint64_t seed = 0;  ///< Of the shards' random numbers.
};

/// Enters what every forward and its criterion runs in, such as autocast. It is left when the
/// result is let go.
using ForwardContext = std::function<std::shared_ptr<void>()>;

/// What a strategy is told. Options that it does not take are a UsageError of make_strategy, which
/// names them and the strategy.
struct StrategyOptions {
  /// Of one kind of strategy. Unset: the defaults.
  std::optional<DdpOptions> ddp = {};
  std::optional<ZeroOptions> zero = {};
  std::optional<FsdpOptions> fsdp = {};
  std::optional<PipelineOptions> pipeline = {};
  std::optional<DataParallelOptions> dp = {};
  /// In place of ddp's options. Unset: a rank's part of a batch is what it is given.
  std::optional<LogicalShardsOptions> logical_shards = {};
  /// Named dimensions of the ranks ("dp=2,pp=2"). Empty: all ranks are one dimension.
  std::string mesh = {};
  /// Empty: nothing is entered.
  ForwardContext forward_context = {};
  /// Compare what all ranks have alike, of the parameters and the optimizer's rate, after the 2nd,
  /// 10th, 100th, ... step and before a save: see Strategy::check_equal.
  bool check_drift = true;
};

}  // namespace lockstep
