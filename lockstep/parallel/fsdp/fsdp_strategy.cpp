#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/core/grad_mode.h>

#include <optional>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/clip.h"
#include "lockstep/parallel/spread_state.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

FsdpOptions options_of(const StrategySetup& setup, FsdpOptions options) {
  const StrategyOptions& given = setup.options;
  options.reshard_after_forward = options.reshard_after_forward && given.reshard_after_forward;
  options.cpu_offload = options.cpu_offload || given.cpu_offload;
  if (given.parameter_dtype) options.parameter_dtype = given.parameter_dtype;
  if (given.reduce_dtype) options.reduce_dtype = given.reduce_dtype;
  return options;
}

class FsdpStrategy : public detail::SpreadStrategy {
 public:
  FsdpStrategy(const StrategySetup& setup, const FsdpOptions& options)
      : SpreadStrategy("fsdp", setup),
        core_(detail::make_fsdp_core(setup.module, setup.group, options_of(setup, options),
                                     setup.device)) {
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

  std::vector<at::Tensor> gradients() const override {
    return detail::gradients_of(core_->shards());
  }
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

 private:
  at::Tensor within_forward(const std::function<at::Tensor()>& forward) {
    try {
      return in_context(forward);
    } catch (...) {
      core_->rethrow_failure();
      throw;
    }
  }

  detail::SpreadModel spread_model() override { return core_->spread_model(); }
  const detail::SpreadOptimizer& spread_optimizer() const override {
    return core_->spread_optimizer();
  }
  Optimizer& optimizer() const override { return *optimizer_; }

  std::unique_ptr<detail::FsdpCore> core_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace

std::unique_ptr<Strategy> make_fsdp_strategy(const StrategySetup& setup,
                                             const FsdpOptions& options) {
  return std::make_unique<FsdpStrategy>(setup, options);
}

}  // namespace lockstep
