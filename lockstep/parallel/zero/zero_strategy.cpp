#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/whole_model.h"
#include "lockstep/parallel/zero/shard_reducer.h"
#include "lockstep/parallel/zero/sharded_optimizer.h"

namespace lockstep {
namespace {

using detail::bytes_of;
using detail::ShardLayout;

/// What DDP's hooks know to reduce in.
CommHook hook_of(std::optional<at::ScalarType> dtype, const std::vector<at::Tensor>& parameters) {
  if (!dtype || (!parameters.empty() && *dtype == parameters.front().scalar_type()))
    return CommHook::none;
  if (*dtype == at::kHalf) return CommHook::fp16_compress;
  if (*dtype == at::kBFloat16) return CommHook::bf16_compress;
  throw UsageError(std::string("zero1: StrategyOptions::reduce_dtype is ") + c10::toString(*dtype),
                   "use float16, bfloat16 or none");
}

/// Whole gradients of one bucket are there at a time, beside the shards. So it is a small part of
/// the model, but large enough that calls cost little.
int64_t bucket_cap(const std::vector<at::Tensor>& parameters) {
  constexpr int64_t kLeast = 1 << 20, kMost = 25 << 20, kPart = 50;
  return std::clamp(bytes_of(parameters) / kPart, kLeast, kMost);
}

/// Stage 1: one bucket a dtype, so that the parts of a rank lie side by side and few messages share
/// them. Stage 2: buckets in about the order in which gradients come, each shared by all ranks.
ShardLayout layout_of(const std::vector<at::Tensor>& parameters, std::vector<size_t> trained,
                      bool may_cut, int stage, int ranks) {
  std::vector<int64_t> sizes(static_cast<size_t>(ranks));
  if (stage == 1) return detail::single_layout(parameters, trained, may_cut, sizes);
  if (!may_cut)
    throw UsageError(
        "strategy zero2: the optimizer looks at whole parameters, of which a rank has "
        "parts only",
        "use strategy zero1 or ddp, or an optimizer that is elementwise");
  std::reverse(trained.begin(), trained.end());
  return detail::even_layout(
      parameters, detail::buckets_of(parameters, trained, bucket_cap(parameters)), ranks);
}

class ZeroStrategy : public detail::WholeModelStrategy {
 public:
  ZeroStrategy(const StrategySetup& setup, int stage)
      : WholeModelStrategy("zero" + std::to_string(stage), setup),
        optimizer_(
            parameters(), setup.make_optimizer, group(),
            [stage, ranks = group().size()](const auto& parameters, const auto& trained,
                                            bool may_cut) {
              return layout_of(parameters, trained, may_cut, stage, ranks);
            },
            name()) {
    if (stage == 1) {
      DdpOptions options;
      options.comm_hook = hook_of(setup.options.reduce_dtype, parameters());
      average_gradients(options);
    } else {
      average_gradients({}, [&](const auto& parameters) {
        auto reducer = std::make_unique<detail::ShardReducer>(optimizer_, parameters, name(),
                                                              setup.options.reduce_dtype);
        reducer_ = reducer.get();
        return reducer;
      });
    }
  }
  /// The reducer uses the optimizer.
  ~ZeroStrategy() override { drop_reducer(); }

  std::vector<at::Tensor> gradients() const override {
    return reducer_ ? reducer_->gradients() : WholeModelStrategy::gradients();
  }
  bool has_sharded_gradients() const override { return reducer_ != nullptr; }
  double clip_grad_norm(double max_norm) override {
    if (!reducer_) return WholeModelStrategy::clip_grad_norm(max_norm);
    return detail::clip_shards(reducer_->gradients(), max_norm, group());
  }

  void step(const StepScale& scale) override {
    expect_last_of_step();
    if (!reducer_) optimizer_.take_gradients();
    optimizer_.step(scale);
    if (!reducer_) optimizer_.drop_gradients();
  }
  void zero_grad() override {
    WholeModelStrategy::zero_grad();
    if (reducer_) reducer_->drop_gradients();
  }

  StateDict optimizer_state() override { return optimizer_.gather_state(0, "optimizer_state"); }
  std::vector<TensorShard> optimizer_shards() override {
    return optimizer_.spread().shards(optimizer_.local().state());
  }
  std::map<size_t, std::vector<TensorBox>> needed_of_optimizer() override {
    return optimizer_.spread().needed();
  }
  void load_optimizer_state(const StateDict& state) override { optimizer_.load_state(state); }

  StateBytes state_bytes() const override {
    const int64_t shards = reducer_ ? reducer_->gradient_bytes() : 0;
    return {bytes_of(parameters()), shards + bytes_of(WholeModelStrategy::gradients()),
            bytes_of(optimizer().state())};
  }

 private:
  Optimizer& optimizer() const override { return optimizer_.local(); }

  detail::ShardedOptimizer optimizer_;
  detail::ShardReducer* reducer_ = nullptr;  ///< Of stage 2; the base owns it.
};

}  // namespace

std::unique_ptr<Strategy> make_zero1_strategy(const StrategySetup& setup) {
  return std::make_unique<ZeroStrategy>(setup, 1);
}

std::unique_ptr<Strategy> make_zero2_strategy(const StrategySetup& setup) {
  return std::make_unique<ZeroStrategy>(setup, 2);
}

}  // namespace lockstep
