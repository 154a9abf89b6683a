#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <optional>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/check_equal.h"
#include "lockstep/optim/clip.h"
#include "lockstep/parallel/spread_state.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

class FsdpStrategy : public detail::RowStrategy {
 public:
  FsdpStrategy(const StrategySetup& setup, const FsdpOptions& options)
      : RowStrategy("fsdp", setup),
        replicate_(setup.replicate_group),
        core_(detail::make_fsdp_core(setup.module,
                                     setup.shard_group ? setup.shard_group : setup.group,
                                     replicate_, options, setup.device)) {
    optimizer_ = setup.make_optimizer(core_->shards());
    if (!optimizer_->is_elementwise())
      throw UsageError("fsdp: the optimizer " + optimizer_->name() +
                           " looks at whole parameters, of which a rank has parts only",
                       "use sgd, adam, adamw, rmsprop or adagrad, or strategy ddp");
  }

  void run_batch(const BatchWork& work) override {
    core_->before_forward();
    const at::Tensor loss = within_forward(work.loss);
    core_->after_forward(/*records=*/true);
    backward(loss);
    core_->check_complete();
    adding_up_ = !work.last_of_step;
  }

  std::optional<at::Tensor> predict(const std::function<at::Tensor()>& forward,
                                    const at::Tensor&) override {
    const at::NoGradGuard no_grad;
    core_->begin_use();
    at::Tensor output = within_forward(forward);
    core_->after_forward(/*records=*/false);
    return output;
  }

  void share_buffers() override { core_->share_buffers(); }

  void begin_schedule() override { core_->begin_schedule(); }
  void end_schedule() override { core_->end_schedule(); }
  void reduce_accumulated() override { core_->reduce_accumulated(); }

  std::vector<at::Tensor> gradients() const override {
    return detail::gradients_of(core_->shards());
  }
  bool has_sharded_gradients() const override { return true; }
  std::vector<at::Tensor> updated() const override { return core_->shards(); }
  double clip_grad_norm(double max_norm) override { return core_->clip_grad_norm(max_norm); }

  void zero_grad() override {
    lockstep::zero_grad(core_->shards());
    adding_up_ = false;
  }

  void load_model_state(const StateDict& state) override {
    core_->load_model_state(state, "the checkpoint's model.safetensors");
  }
  void load_optimizer_state(const StateDict& state) override {
    const StateDict own = core_->own_optimizer_state(state, "the checkpoint's optimizer state");
    optimizer_->load_state(own);
  }

  StateBytes state_bytes() const override {
    return {core_->parameter_bytes(), core_->gradient_bytes(),
            detail::bytes_of(optimizer_->state())};
  }

  detail::SpreadModel spread_model() override { return core_->spread_model(); }
  detail::SpreadOptimizer spread_optimizer() override { return core_->spread_optimizer(); }
  Optimizer& optimizer() const override { return *optimizer_; }

  /// Replicas have the same shards.
  void check_equal() override {
    if (!checks_drift_ || !replicate_) return;
    detail::Compared mine{.what = "strategy fsdp"};
    for (size_t i = 0; i < core_->shards().size(); ++i)
      mine.tensors.emplace_back("shard " + std::to_string(i), core_->shards()[i].detach());
    detail::check_equal(mine, replicate_);
  }

 private:
  bool gives_states() const override { return !replicate_ || replicate_.rank() == 0; }
  void compare_ranks() override {
    RowStrategy::compare_ranks();
    check_equal();
  }

  at::Tensor within_forward(const std::function<at::Tensor()>& forward) {
    try {
      return in_context(forward);
    } catch (...) {
      core_->rethrow_failure();
      throw;
    }
  }

  ProcessGroup replicate_;
  std::unique_ptr<detail::FsdpCore> core_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace

std::unique_ptr<Strategy> make_fsdp_strategy(const StrategySetup& setup) {
  return detail::make_fsdp_row(setup, /*micro_batches=*/false);
}

std::unique_ptr<detail::RowStrategy> detail::make_fsdp_row(const StrategySetup& setup,
                                                           bool micro_batches) {
  FsdpOptions options = setup.options.fsdp.value_or(FsdpOptions());
  if (micro_batches) {
    options.init_sync = false;  // A pipeline has seen to it.
    const auto modules = setup.module->named_modules("", /*include_self=*/false);
    std::erase_if(options.units, [&](const std::string& unit) {
      return !modules.contains(unit.ends_with(".*") ? unit.substr(0, unit.size() - 2) : unit);
    });
  }
  return std::make_unique<FsdpStrategy>(setup, options);
}

}  // namespace lockstep
