#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/shard_reducer.h"
#include "lockstep/parallel/whole_model.h"
#include "lockstep/parallel/zero/sharded_optimizer.h"

namespace lockstep {
namespace {

using detail::bytes_of;

/// What DDP's hooks know to reduce in.
CommHook hook_of(std::optional<at::ScalarType> dtype, const std::vector<at::Tensor>& parameters) {
  if (!dtype || (!parameters.empty() && *dtype == parameters.front().scalar_type()))
    return CommHook::none;
  if (*dtype == at::kHalf) return CommHook::fp16_compress;
  if (*dtype == at::kBFloat16) return CommHook::bf16_compress;
  throw UsageError(std::string("zero1: ZeroOptions::reduce_dtype is ") + c10::toString(*dtype),
                   "use float16, bfloat16 or none");
}

/// What is packed and sent at a time, of all ranks together. It stays in the cache between the two,
/// and is little beside a model's state.
constexpr int64_t kPackBytes = 1 << 20;

/// Stage 2 of ZeRO: gradients are averaged while backward runs, each part on the rank that updates
/// it. `optimizer` must outlive this.
class PartReducer : public detail::ShardReducer {
 public:
  /// `parameters`: those of the optimizer's that need a gradient. `dtype`: to reduce in, in place
  /// of the gradients' own.
  PartReducer(detail::ShardedOptimizer& optimizer,
              const std::vector<detail::ReducedParameter>& parameters, const std::string& what,
              std::optional<at::ScalarType> dtype, const ProcessGroup& replicate)
      : ShardReducer(optimizer.shards().units(), parameters, optimizer.shards().parts(),
                     optimizer.shards().group(),
                     {.what = what,
                      .caller = "ZeRO",
                      .dtype = dtype,
                      .chunk_bytes = kPackBytes,
                      .replicate = replicate}),
        optimizer_(optimizer) {}

  void before_forward() override { optimizer_.follow_parameters(); }

 private:
  detail::ShardedOptimizer& optimizer_;
};

class ZeroStrategy : public detail::WholeModelStrategy {
 public:
  ZeroStrategy(const StrategySetup& setup, int stage, bool micro_batches)
      : WholeModelStrategy("zero" + std::to_string(stage), setup),
        replica_(setup.replicate_group ? setup.replicate_group.rank() : 0),
        optimizer_(parameters(), setup.make_optimizer,
                   setup.shard_group ? setup.shard_group : group(), name(),
                   /*small_buckets=*/stage == 2) {
    const auto reduce_dtype = setup.options.zero.value_or(ZeroOptions()).reduce_dtype;
    DdpOptions options;
    if (stage == 1) {
      options.comm_hook = hook_of(reduce_dtype, parameters());
      average_gradients(options, micro_batches);
      return;
    }
    average_gradients(options, micro_batches, [&](const auto& parameters) {
      auto reducer = std::make_unique<PartReducer>(optimizer_, parameters, name(), reduce_dtype,
                                                   setup.replicate_group);
      reducer_ = reducer.get();
      return reducer;
    });
  }
  /// The reducer uses the optimizer.
  ~ZeroStrategy() override { drop_reducer(); }

  std::vector<at::Tensor> gradients() const override {
    return reducer_ ? reducer_->means() : WholeModelStrategy::gradients();
  }
  bool has_sharded_gradients() const override { return reducer_ != nullptr; }
  double clip_grad_norm(double max_norm) override {
    if (!reducer_) return WholeModelStrategy::clip_grad_norm(max_norm);
    return detail::clip_shards(reducer_->means(), max_norm, optimizer_.shards().group());
  }

  void update(const StepScale& scale) override {
    if (!reducer_) optimizer_.take_gradients();
    optimizer_.step(scale);
    if (!reducer_) optimizer_.drop_gradients();
  }
  void zero_grad() override {
    WholeModelStrategy::zero_grad();
    if (reducer_) reducer_->drop();
  }

  void begin_schedule() override { optimizer_.follow_parameters(); }
  std::vector<at::Tensor> updated() const override { return optimizer_.shards().parts(); }
  Optimizer& optimizer() const override { return optimizer_.local(); }
  detail::SpreadOptimizer spread_optimizer() override { return optimizer_.spread(); }
  StateDict optimizer_state() override {
    return replica_ == 0 ? optimizer_.spread().gather(optimizer().state()) : StateDict();
  }
  void load_optimizer_state(const StateDict& state) override { optimizer_.load_state(state); }

  StateBytes state_bytes() const override {
    const int64_t shards = reducer_ ? reducer_->bytes() : 0;
    return {bytes_of(parameters()), shards + bytes_of(WholeModelStrategy::gradients()),
            bytes_of(optimizer().state())};
  }

 private:
  int replica_;
  detail::ShardedOptimizer optimizer_;
  PartReducer* reducer_ = nullptr;  ///< Of stage 2; the base owns it.
};

}  // namespace

std::unique_ptr<Strategy> make_zero1_strategy(const StrategySetup& setup) {
  return detail::make_zero1_row(setup, false);
}

std::unique_ptr<Strategy> make_zero2_strategy(const StrategySetup& setup) {
  return detail::make_zero2_row(setup, false);
}

std::unique_ptr<detail::RowStrategy> detail::make_zero1_row(const StrategySetup& setup,
                                                            bool micro_batches) {
  return std::make_unique<ZeroStrategy>(setup, 1, micro_batches);
}

std::unique_ptr<detail::RowStrategy> detail::make_zero2_row(const StrategySetup& setup,
                                                            bool micro_batches) {
  return std::make_unique<ZeroStrategy>(setup, 2, micro_batches);
}

}  // namespace lockstep
