#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <torch/nn/module.h>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

class DpStrategy : public detail::WholeOptimizerStrategy {
 public:
  explicit DpStrategy(const StrategySetup& setup)
      : WholeOptimizerStrategy("dp", checked(setup)),
        core_(setup.module, setup.options.dp.value_or(DataParallelOptions()), {}),
        module_(setup.module),
        run_(setup.forward) {
    core_.make_replicas({});
  }

  void run_batch(const BatchWork& work) override {
    if (core_.devices().size() == 1) return backward(compute_loss(work));
    if (!work.criterion || !work.input.defined() || !work.target.defined()) {
      throw UsageError("strategy dp: the batch has no input, target and criterion",
                       "dp cuts batches itself: give BatchWork all three, or use ddp, which calls "
                       "`loss` as it is");
    }
    BatchWork whole = work;
    whole.loss = [&] { return work.criterion(forward(work.input), work.target); };
    backward(compute_loss(whole));
  }

  std::optional<at::Tensor> predict(const std::function<at::Tensor()>& whole,
                                    const at::Tensor& input) override {
    if (core_.devices().size() == 1 || !input.defined())
      return WholeOptimizerStrategy::predict(whole, input);
    return WholeOptimizerStrategy::predict([&] { return forward(input); }, input);
  }

 private:
  static const StrategySetup& checked(const StrategySetup& setup) {
    if (setup.group && setup.group.size() > 1) {
      throw UsageError(
          "strategy dp runs in one process, not in " + counted(setup.group.size(), "rank"),
          "start one rank (--devices 1) with several replicas, or use ddp");
    }
    if (!setup.forward) {
      throw UsageError("strategy dp: it is not known how a copy of the module is run",
                       "set StrategySetup::forward");
    }
    return setup;
  }

  at::Tensor forward(const at::Tensor& input) {
    auto parts = lockstep::scatter(input, core_.devices(), core_.dim());
    if (parts.size() < 2) return run_(*module_, input);
    return core_.run(parts, {}, [this](const auto& replica, const at::Tensor& part) {
      return run_(*replica, part);
    });
  }

  detail::DataParallelCore core_;
  std::shared_ptr<torch::nn::Module> module_;
  std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)> run_;
};

}  // namespace

std::unique_ptr<Strategy> make_dp_strategy(const StrategySetup& setup) {
  return std::make_unique<DpStrategy>(setup);
}

}  // namespace lockstep
