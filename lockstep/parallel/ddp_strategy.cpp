#include "lockstep/parallel/ddp_strategy.h"

#include <torch/nn/module.h>

#include <optional>

#include "lockstep/autograd/backward.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

class DdpStrategy : public detail::WholeOptimizerStrategy {
 public:
  DdpStrategy(const StrategySetup& setup, const DdpOptions& options)
      : WholeOptimizerStrategy(setup) {
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

 private:
  std::string name_ = "ddp";
  std::optional<detail::DdpCore> core_;
};

}  // namespace

std::unique_ptr<Strategy> make_ddp_strategy(const StrategySetup& setup, const DdpOptions& options) {
  return std::make_unique<DdpStrategy>(setup, options);
}

}  // namespace lockstep
