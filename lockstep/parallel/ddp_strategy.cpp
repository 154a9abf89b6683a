#include "lockstep/parallel/ddp_strategy.h"

#include <torch/nn/module.h>

#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

class DdpStrategy : public detail::WholeOptimizerStrategy {
 public:
  DdpStrategy(const StrategySetup& setup, const DdpOptions& options)
      : WholeOptimizerStrategy(setup) {
    average_gradients(options);
  }

  const std::string& name() const override { return name_; }

 private:
  std::string name_ = "ddp";
};

}  // namespace

std::unique_ptr<Strategy> make_ddp_strategy(const StrategySetup& setup, const DdpOptions& options) {
  return std::make_unique<DdpStrategy>(setup, options);
}

}  // namespace lockstep
