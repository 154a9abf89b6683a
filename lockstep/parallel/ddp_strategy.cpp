#include "lockstep/parallel/ddp_strategy.h"

#include <torch/nn/module.h>

#include <optional>

#include "lockstep/autograd/backward.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

class DdpStrategy : public detail::WholeModelStrategy {
 public:
  DdpStrategy(const StrategySetup& setup, const DdpOptions& options)
      : WholeModelStrategy(setup), optimizer_(setup.make_optimizer(parameters())) {
    if (group().size() > 1) core_.emplace(module(), group(), options);
  }

  const std::string& name() const override { return name_; }

  void run_batch(const BatchWork& work) override {
    if (!core_) return backward(compute_loss(work));
    core_->synchronizing() = work.last_of_step;
    core_->before_forward();
    std::vector<at::Tensor> losses{compute_loss(work)};
    core_->after_forward(losses);
    backward(losses.front());
  }

  void warm_up(const BatchWork& work) override {
    if (!core_) return;
    run_batch(work);
    zero_grad();
  }

  void step(const StepScale& scale) override {
    scale.grad_scale.defined() || scale.found_inf.defined() ? optimizer_->step_scaled(scale)
                                                            : optimizer_->step();
  }
  void set_lr(double lr) override { optimizer_->set_lr(lr); }
  double lr() const override { return optimizer_->lr(); }

  OptimizerState optimizer_state() override {
    return group().rank() == 0 ? optimizer_->state() : OptimizerState();
  }
  void load_optimizer_state(const OptimizerState& state) override { optimizer_->load_state(state); }
  StateBytes state_bytes() const override {
    return {detail::bytes_of(parameters()), detail::bytes_of(gradients()),
            detail::bytes_of(optimizer_->state())};
  }

 private:
  std::string name_ = "ddp";
  std::unique_ptr<Optimizer> optimizer_;
  std::optional<detail::DdpCore> core_;
};

}  // namespace

std::unique_ptr<Strategy> make_ddp_strategy(const StrategySetup& setup, const DdpOptions& options) {
  return std::make_unique<DdpStrategy>(setup, options);
}

}  // namespace lockstep
